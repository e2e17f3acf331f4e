// Who holds how much: kinds' bytes added up along module -> op -> line, or any other keys.

import type { Dataset } from "./dataset";
import { alike, exactly, hierarchy, type Level } from "./folded";

export type Measure = "held" | "grew" | "made" | "freed" | "bytetime";
export type Only = "all" | "peak" | "saved" | "end" | "grew" | `finding ${number}`;

export const isOnly = (text: string): text is Only =>
  /^(all|peak|saved|end|grew|finding \d{1,2})$/.test(text);

/** The finding's place in the list of findings; -1 where the choice is another. */
export const findingOf = (only: Only) =>
  only.startsWith("finding") ? Number(only.split(" ")[1]) : -1;

export interface Node {
  name: string;
  key: string; // what kind of name it is: "module", "op", ...
  word: string; // of a search for exactly this
  bytes: number; // of a comparison: after less before
  count: number;
  before: number; // of a comparison
  children: Node[];
  others: number; // children that are not listed; `bytes` has them all the same
  same: number; // of a comparison: children that did not change, which are not listed either
}

export interface Totals {
  bytes: Float64Array; // per kind
  counts: Float64Array;
}

export interface Moment {
  measure: Measure;
  at: number; // a change
  from: number; // of a range, whose end is `at`
}

/** What a row without a name is called. */
export const nameless = (key: string) => (key === "module" ? "no module" : "not known");

/** The key whose names are the rows of the model's tree. */
export const MODEL = "model";

/** The search for what is in the last of these nodes, each of which is within the one before. */
export function searchOf(path: Node[]): string {
  const words = new Map(path.map((node) => [node.key, node.word]));
  return [...words.values()].filter(Boolean).join(" ");
}

export type Names = (key: string, name: string) => string;

const asTheyAre: Names = (_, name) => name;

export interface Part {
  data: Dataset;
  found: Totals;
  sign: number;
  names?: Names;
}

/** The line of the program itself, which may call a library that has the line. */
export const OWN_LINE = "own_line";

/**
 * Of each key, the name with most bytes, up or down; nothing where no name is known. Alike layers
 * count as one module.
 */
export function largest(parts: Part[], keys: string[]): Largest[] {
  return keys.flatMap((key) => {
    const bytes = new Map<string, number>();
    for (const { data, found, sign, names = asTheyAre } of parts) {
      const texts = data.text(key);
      for (let kind = 0; kind < texts.length; kind++) {
        if (texts[kind] === 0 || found.bytes[kind] === 0) continue;
        const name = names(key, data.words.strings[texts[kind]]);
        bytes.set(name, (bytes.get(name) ?? 0) + sign * found.bytes[kind]);
      }
    }
    const layer = key === "module" ? alike([...bytes.keys()]) : null;
    const sums = new Map<string, Largest>();
    for (const [text, amount] of bytes) {
      const { name, word } = layer?.(text) ?? { name: text, word: exactly(key, asWritten(text)) };
      const sum = sums.get(name) ?? { key, name, word, bytes: 0 };
      sums.set(name, { ...sum, bytes: sum.bytes + amount });
    }
    const size = (one: Largest) => Math.abs(one.bytes);
    const first = [...sums.values()].reduce<Largest | null>(
      (most, one) => (size(one) > (most ? size(most) : 0) ? one : most),
      null,
    );
    return first ? [first] : [];
  });
}

/**
 * The names of a side of a comparison, as the other side has them: modules without wrappers, and
 * lines that only moved under their new number.
 */
export function namesBeside(own: Dataset, other: Dataset): Names {
  const { modules } = own.facts.aligned;
  const lines = new Map<string, string>();
  for (const one of own === other ? [] : [own, other]) {
    for (const [old, now] of Object.entries(one.facts.aligned.lines)) {
      const shown = `${now} (was ${old.slice(old.lastIndexOf(":") + 1)})`;
      lines.set(one === own ? now : old, shown);
    }
  }
  return (key, name) => {
    if (key === "module") return modules[name] ?? name;
    return key === "line" || key === OWN_LINE ? (lines.get(name) ?? name) : name;
  };
}

export interface Largest {
  key: string;
  name: string;
  word: string; // a search for it
  bytes: number;
}

const MOST_CHILDREN = 300;

/** What allocations pass, beside the search. */
export function passes(data: Dataset, only: Only, moment: Moment): (i: number) => boolean {
  const peak = data.facts.peak_change;
  if (only === "peak") return (i) => data.alive(i, peak);
  if (only === "end") return (i) => data.end[i] >= data.changes;
  if (only === "saved") {
    const number = data.words.categories.indexOf("activations");
    return (i) => data.category[data.kind[i]] === number;
  }
  const finding = findingOf(only);
  if (finding >= 0) return (i) => ((data.finding[i] >>> finding) & 1) === 1;
  if (only === "grew") return (i) => data.start[i] > moment.from && data.alive(i, moment.at);
  return () => true;
}

/** Bytes and allocations per kind. */
export function totals(data: Dataset, moment: Moment, pass: (i: number) => boolean): Totals {
  const bytes = new Float64Array(data.size.length);
  const counts = new Float64Array(data.size.length);
  const { at, from } = moment;
  const add = (i: number, times: number) => {
    const kind = data.kind[i];
    bytes[kind] += data.size[kind] * times;
    counts[kind] += Math.sign(times);
  };
  const held = (change: number, sign: number) =>
    data.overlapping(change, change, (i) => {
      if (pass(i)) add(i, sign);
    });
  if (moment.measure === "held") held(at, 1);
  else if (moment.measure === "grew") {
    held(at, 1);
    held(from, -1);
  } else if (moment.measure === "bytetime") {
    const begin = data.xOf("time", from);
    const end = data.xOf("time", at);
    data.overlapping(from, at, (i) => {
      const left = Math.max(begin, data.xOf("time", data.start[i]));
      const right = Math.min(end, data.xOf("time", data.end[i]));
      if (pass(i) && right > left) add(i, (right - left) / 1e9);
    });
  } else {
    const wanted = moment.measure === "made" ? 1 : 0;
    for (let k = Math.max(from + 1, 0); k <= at; k++) {
      if (data.begins[k] === wanted && pass(data.of[k])) add(data.of[k], 1);
    }
  }
  return { bytes, counts };
}

interface Growing {
  node: Node;
  children: Map<string, Growing>;
}

function growing(name: string, key: string, word: string): Growing {
  const sums = { bytes: 0, count: 0, before: 0 };
  return {
    node: { name, key, word, ...sums, children: [], others: 0, same: 0 },
    children: new Map(),
  };
}

/** A line that moved has its old number beside its name. */
export const asWritten = (name: string) => name.replace(/ \(was \d+\)$/, "");

export class Tree {
  private readonly root = growing("", "", "");

  constructor(
    private readonly keys: string[],
    private readonly compares = false,
    private readonly modules: (path: string) => Level[] = hierarchy([]),
  ) {}

  /** `sign` is -1 for the side of a comparison that was before. */
  add(data: Dataset, found: Totals, sign = 0, names: Names = asTheyAre): void {
    const texts = this.keys.map((key) => data.text(key === MODEL ? "module" : key));
    for (let kind = 0; kind < found.bytes.length; kind++) {
      if (found.counts[kind] === 0 && found.bytes[kind] === 0) continue;
      const path = texts.map((column, i) => {
        const key = this.keys[i] === MODEL ? "module" : this.keys[i];
        return names(key, data.words.strings[column[kind]]);
      });
      this.addPath(path, found.bytes[kind], found.counts[kind], sign);
    }
  }

  /** A name for each key; the model's key has several rows. */
  addPath(path: string[], bytes: number, count: number, sign = 0): void {
    let at = this.root;
    grow(at.node, bytes, count, sign);
    this.keys.forEach((key, i) => {
      if (key === MODEL) {
        for (const { name, word } of this.modules(path[i])) {
          at = child(at, name, "module", () => word);
          grow(at.node, bytes, count, sign);
        }
      } else {
        at = child(at, path[i], key, () => exactly(key, asWritten(path[i])));
        grow(at.node, bytes, count, sign);
      }
    });
  }

  finished(): Node {
    return finish(this.root, this.compares);
  }
}

function child(at: Growing, name: string, key: string, word: () => string): Growing {
  let found = at.children.get(name);
  if (!found) {
    found = growing(name, key, word());
    at.children.set(name, found);
  }
  return found;
}

function grow(node: Node, bytes: number, count: number, sign: number): void {
  const change = sign < 0 ? -1 : 1;
  node.bytes += change * bytes;
  node.count += change * count;
  if (sign < 0) node.before += bytes;
}

function finish(grown: Growing, compares: boolean): Node {
  const all = [...grown.children.values()];
  const listed = compares ? all.filter(changed) : all;
  listed.sort((a, b) => Math.abs(b.node.bytes) - Math.abs(a.node.bytes));
  const kept = listed.slice(0, MOST_CHILDREN);
  return {
    ...grown.node,
    children: kept.map((one) => finish(one, compares)),
    others: listed.length - kept.length,
    same: all.length - listed.length,
  };
}

/** Two children may change by opposite amounts, so a sum of 0 alone does not mean "the same". */
function changed({ node, children }: Growing): boolean {
  return node.bytes !== 0 || node.count !== 0 || [...children.values()].some(changed);
}
