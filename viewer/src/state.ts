// What the page shows, as one value: it goes into the address, and Backspace takes it back.

import { COLOR_BY, type ColorBy } from "./colors";
import type { Axis } from "./dataset";
import type { Layout } from "./engine";
import { isOnly, type Measure, type Only } from "./tree";
import type { Sort } from "./treetable";

export const VIEWS = [
  ...(["ranks", "books", "timeline", "map"] as const),
  ...(["modules", "lines", "steps", "compare"] as const),
];
export type Tab = (typeof VIEWS)[number];

/** Names in addresses that somebody may have kept. */
const OLD_TABS: Record<string, Tab | undefined> = { who: "modules", bar: "map" };

export const GROUPS = [
  "model,op,line",
  "module,op,line",
  "category,model,op",
  "op,line,module",
  "line,op",
  "category,role,name",
  "phase,model,op",
  "name,shape,dtype",
];
export const LINES = ["line", "op", "module"];
export const OWN_LINES = ["own_line", "line", "op"]; // of a program that calls libraries
export const LAYOUTS: Layout[] = ["address", "category", "module"];
export const MEASURES: Measure[] = ["held", "grew", "made", "freed", "bytetime"];
export const KEYS = [
  "model",
  "module",
  "op",
  "line",
  "category",
  "phase",
  "role",
  "name",
  "shape",
  "dtype",
];

export interface State {
  set: number;
  axis: Axis;
  from: number; // what is seen, on the axis
  to: number;
  low: number; // and of the map, in bytes
  high: number; // 0: all of it
  cursor: number; // a change
  begin: number | null; // of a range that ends at the cursor: a change
  layout: Layout;
  color: ColorBy;
  only: Only;
  measure: Measure;
  keys: string[];
  hidden: string[];
  search: string;
  pinned: number | null;
  tab: Tab;
  before: string; // the sides of a comparison, "set:change"; "": the usual ones
  after: string;
  sort: Sort;
  open: string; // rows of the table that are open
  theme: Theme;
  room: Room;
}

/** What the picture of categories leaves room for: categories, or also what the device has in use. */
export type Room = "categories" | "device";

export type Theme = "system" | "light" | "dark";

/** As short as it can be: only what is not as it was when the page was opened. */
export function toHash(state: State, usual: State): string {
  const words = new URLSearchParams();
  for (const name of Object.keys(usual) as (keyof State)[]) {
    const value = state[name];
    if (String(value) === String(usual[name])) continue;
    words.set(
      name,
      typeof value === "number" ? String(Number(value.toPrecision(12))) : String(value),
    );
  }
  return words.toString();
}

/** What somebody typed may be anything: what is not understood stays as it was. */
export function fromHash(hash: string, usual: State): State {
  const words = new URLSearchParams(hash.replace(/^#/, ""));
  const one = <T extends string>(name: string, known: readonly T[], otherwise: T): T => {
    const word = words.get(name) as T | null;
    return word !== null && known.includes(word) ? word : otherwise;
  };
  const number = (name: string, otherwise: number) => {
    const word = words.get(name);
    const value = word === null || word === "" ? Number.NaN : Number(word);
    return Number.isFinite(value) ? value : otherwise;
  };
  const maybe = (name: string, otherwise: number | null) =>
    words.has(name) ? numberOrNull(words.get(name)) : otherwise;
  const list = (name: string, otherwise: string[]) =>
    words.has(name) ? (words.get(name) ?? "").split(",").filter(Boolean) : otherwise;
  const side = (name: string, otherwise: string) => {
    const word = words.get(name);
    return word !== null && /^\d+:-?\d+$/.test(word) ? word : otherwise;
  };
  const keys = list("keys", usual.keys).filter((key) => KEYS.includes(key));
  const only = words.get("only") ?? usual.only;
  const from = number("from", usual.from);
  const to = number("to", usual.to);
  return {
    set: number("set", usual.set),
    axis: one("axis", ["time", "events"], usual.axis),
    from: to > from ? from : usual.from,
    to: to > from ? to : usual.to,
    low: number("low", usual.low),
    high: number("high", usual.high),
    cursor: number("cursor", usual.cursor),
    begin: maybe("begin", usual.begin),
    layout: one("layout", LAYOUTS, usual.layout),
    color: one("color", COLOR_BY, usual.color),
    only: isOnly(only) ? only : usual.only,
    measure: one("measure", MEASURES, usual.measure),
    keys: keys.length ? keys : usual.keys,
    hidden: list("hidden", usual.hidden),
    search: words.get("search") ?? usual.search,
    pinned: maybe("pinned", usual.pinned),
    tab: OLD_TABS[words.get("tab") ?? ""] ?? one("tab", VIEWS, usual.tab),
    before: side("before", usual.before),
    after: side("after", usual.after),
    sort: one("sort", ["bytes", "count", "name"], usual.sort),
    open: words.get("open") ?? usual.open,
    theme: one("theme", ["system", "light", "dark"], usual.theme),
    room: one("room", ["categories", "device"], usual.room),
  };
}

function numberOrNull(word: string | null): number | null {
  const value = word === null || word === "" || word === "null" ? Number.NaN : Number(word);
  return Number.isFinite(value) ? value : null;
}

/** What was shown before, and before that. */
export class History {
  private readonly past: State[] = [];

  keep(state: State): void {
    this.past.push({ ...state });
    if (this.past.length > 200) this.past.shift();
  }

  back(): State | undefined {
    return this.past.pop();
  }
}
