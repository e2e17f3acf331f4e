// Answers the page's questions about the data. It runs in a worker, or in the page where a worker
// is not to be had; it knows nothing of the page.

import { abgr, type ColorBy, type Coloring, coloring, faded, type LegendEntry } from "./colors";
import { type Axis, COLUMNS, type Columns, Dataset, sum } from "./dataset";
import { type Bytes, inflate } from "./decode";
import type { Document, Facts } from "./document";
import { hierarchy, type Level } from "./folded";
import { type Lanes, lanes } from "./lanes";
import { type Places, placesOf } from "./places";
import {
  type Bars,
  barAt,
  coarser,
  drawArea,
  drawBars,
  drawFrom,
  drawNumbers,
  fitting,
  type Picture,
  paintNumbers,
  type Window,
} from "./raster";
import { type Found, type Matched, search } from "./search";
import {
  type Largest,
  largest,
  type Moment,
  type Node,
  namesBeside,
  type Only,
  OWN_LINE,
  type Part,
  passes,
  Tree,
  totals,
} from "./tree";

export type Layout = "address" | "category" | "module";

export interface Look {
  set: number;
  axis: Axis;
  layout: Layout;
  color: ColorBy;
  hidden: string[]; // categories
  only: Only;
  search: string;
  dark: boolean;
  moment: Moment;
}

export interface DrawRequest extends Look {
  from: number;
  to: number;
  soon: boolean; // a coarse picture is enough, because what is seen still moves
  area: { width: number; height: number; least: number };
  map: { width: number; height: number; low: number; high: number };
}

export interface Drawing {
  area: Uint32Array<ArrayBuffer>;
  top: number;
  map: Uint32Array<ArrayBuffer>;
  legend: LegendEntry[];
  lanes: { name: string; bottom: number; height: number }[];
  highest: number; // of the map, in bytes
  exact: boolean; // every bar was drawn
}

export interface Strip {
  area: Uint32Array<ArrayBuffer>;
  top: number;
}

export interface MomentFacts {
  change: number;
  x: number;
  time_ns: number;
  levels: number[];
  bytes: number;
}

export interface Who {
  tree: Node;
  bytes: number;
  count: number;
  allBytes: number; // without the search
  allCount: number;
  rest: number; // bytes that are in no allocation of the page
  largest: Largest[];
}

export interface Bar {
  allocation: number;
  row: number;
  texts: Record<string, string>;
  bytes: number;
  block: number;
  start_ns: number | null;
  end_ns: number | null;
  start: number;
  end: number;
  address: string;
  atPeak: boolean;
  alike: number;
  bottoms: Partial<Record<Layout, number>>; // where it is drawn, in the layouts that are known
}

export interface HitRequest extends Look {
  from: number;
  to: number;
  x: number;
  bytes: number;
  reachX: number;
  reachBytes: number;
}

export interface Side {
  set: number;
  change: number;
}

export interface Comparison {
  tree: Node;
  largest: Largest[];
  counts: [before: number, after: number]; // of blocks
  inputs: [before: number, after: number]; // bytes of what the model was given
}

/** Every question, and what its answer is. */
export interface Questions {
  column: [{ id: string; bytes: Bytes }, null];
  load: [{ text: string }, Places[]];
  draw: [DrawRequest, Drawing | null];
  strip: [{ set: number; axis: Axis; width: number; height: number }, Strip];
  moment: [
    { set: number; axis: Axis; x: number } | { set: number; change: number; axis: Axis },
    MomentFacts,
  ];
  peak: [{ set: number; axis: Axis; from: number; to: number }, MomentFacts];
  who: [Look & { keys: string[] }, Who];
  matched: [Look, Matched[]];
  hit: [HitRequest, Bar | null];
  bar: [{ set: number; allocation: number }, Bar];
  compare: [{ keys: string[]; before: Side; after: Side }, Comparison];
  rows: [Look & { most: number }, Bar[]];
}

export type Question = keyof Questions;

const LARGEST_OF = ["line", "module", "op"];
const MOST_AT_ONCE = 150_000; // bars that are drawn anew while what is seen moves
const NUMBERS_WIDTH = 4096; // pixels of the whole trace, from which a moving picture is taken
const LEAST_WIDTH = 512;
const MOST_WHOLE = 2; // layouts or colourings of the whole trace, of some 15 MB each
const SLICE_MS = 12; // of work, until another question may come first

/** The whole trace in one layout, height and colouring, the widest picture first. */
interface Painted {
  pictures: Picture[];
  highest: number; // bytes at the upper edge
}

export class Engine {
  private readonly sets: Dataset[] = [];
  private readonly columns = new Map<string, Promise<Uint8Array>>();
  private readonly kept = new Map<string, unknown>();
  private readonly numbers = new Map<string, Picture[]>();
  private readonly painted = new Map<string, Painted>();
  private drawn = 0; // the latest picture that was asked for
  private painting = ""; // what is being painted

  async answer<Q extends Question>(what: Q, about: Questions[Q][0]): Promise<Questions[Q][1]> {
    const how = this[what] as unknown as (about: Questions[Q][0]) => Questions[Q][1];
    return how.call(this, about);
  }

  /** A column begins to be opened when it arrives; `load` waits for all. */
  protected column({ id, bytes }: { id: string; bytes: Bytes }): null {
    this.columns.set(id, inflate(bytes));
    return null;
  }

  /** The document is sent as text, which is copied sooner than what it holds. */
  protected async load({ text }: { text: string }): Promise<Places[]> {
    const { sets, ...words }: Document = JSON.parse(text);
    for (const [i, facts] of sets.entries()) {
      const columns = {} as Columns;
      for (const name of COLUMNS) {
        columns[name] = (await this.columns.get(`${i}-${name}`)) ?? new Uint8Array(0);
      }
      this.sets.push(new Dataset(facts, words, columns));
    }
    this.columns.clear();
    return this.sets.map((data) => placesOf(data));
  }

  /** Null where another picture was asked for meanwhile. */
  protected async draw(request: DrawRequest): Promise<Drawing | null> {
    const turn = ++this.drawn;
    const data = this.sets[request.set];
    const window: Window = { axis: request.axis, from: request.from, to: request.to };
    const { categories, colors } = data.words;
    const hidden = categories.map((name) => request.hidden.includes(name));
    const palette = categories.map((name) => abgr(colors[name]));
    const { area, map } = request;
    const drawn = drawArea(data, window, area.width, area.height, palette, hidden, area.least);
    const found = this.coloring(request);
    const bars = this.bars(request, map.low, map.high);
    const painted = request.soon ? this.coarse(request, window) : undefined;
    const picture = painted
      ? this.drawSoon(request, painted, window, data, bars)
      : await finish(
          drawBars(data, window, map.width, map.height, bars),
          () => turn === this.drawn,
        );
    if (!picture) return null;
    this.prepare(request);
    return {
      area: drawn.picture.pixels,
      top: drawn.top,
      map: picture.pixels,
      legend: found.legend,
      lanes: this.lanes(request)?.lanes ?? [],
      highest: this.highest(request),
      exact: !painted,
    };
  }

  private drawSoon(
    { map }: DrawRequest,
    painted: Painted,
    window: Window,
    data: Dataset,
    bars: Bars,
  ): Picture {
    const whole = fitting(painted.pictures, data, window, map.width);
    return drawFrom(whole, data, window, map.width, map.height, painted.highest, bars);
  }

  /** Pictures of the whole trace, where drawing each bar would take long and there are some. */
  private coarse(request: DrawRequest, window: Window): Painted | undefined {
    const data = this.sets[request.set];
    const [first, last] = [window.from, window.to].map((x) => data.changeAt(window.axis, x));
    const about = data.runs(first, last).reduce((bars, [begin, stop]) => bars + stop - begin, 0);
    return about > MOST_AT_ONCE ? this.painted.get(paintedKey(request)) : undefined;
  }

  /** Paints the whole trace beside other work, where there are many allocations. */
  private async prepare(request: DrawRequest): Promise<void> {
    const data = this.sets[request.set];
    const key = paintedKey(request);
    if (data.count <= MOST_AT_ONCE || this.painted.has(key) || this.painting === key) return;
    this.painting = key;
    const wanted = () => this.painting === key;
    const highest = this.highest(request);
    const bars = this.bars(request, 0, highest);
    const numbers = await this.number(request, bars, wanted);
    const pictures: Picture[] = [];
    for (const each of numbers ?? []) {
      const picture = await finish(paintNumbers(each, data, bars), wanted);
      if (!picture) return;
      pictures.push(picture);
    }
    if (pictures.length === 0) return;
    this.painting = "";
    keep(this.painted, key, { pictures, highest });
  }

  /** The whole trace as numbers of allocations, the widest picture first: however it is coloured. */
  private async number(
    request: DrawRequest,
    bars: Bars,
    wanted: () => boolean,
  ): Promise<Picture[] | null> {
    const key = numbersKey(request);
    const known = this.numbers.get(key);
    if (known) return known;
    const { height } = request.map;
    const drawing = drawNumbers(this.sets[request.set], NUMBERS_WIDTH, height, bars);
    const widest = await finish(drawing, wanted);
    if (!widest) return null;
    const found = coarser(widest, LEAST_WIDTH);
    keep(this.numbers, key, found);
    return found;
  }

  protected strip(about: { set: number; axis: Axis; width: number; height: number }): Strip {
    const data = this.sets[about.set];
    const [from, to] = data.bounds(about.axis);
    const palette = data.words.categories.map((name) => abgr(data.words.colors[name]));
    const none = palette.map(() => false);
    const window = { axis: about.axis, from, to };
    const drawn = drawArea(data, window, about.width, about.height, palette, none, 0);
    return { area: drawn.picture.pixels, top: drawn.top };
  }

  protected moment(
    about: { set: number; axis: Axis; x: number } | { set: number; change: number; axis: Axis },
  ): MomentFacts {
    const data = this.sets[about.set];
    const change =
      "x" in about
        ? data.changeAt(about.axis, about.x)
        : Math.max(-1, Math.min(data.changes - 1, about.change));
    return momentOf(data, about.axis, change);
  }

  protected peak(about: { set: number; axis: Axis; from: number; to: number }): MomentFacts {
    const data = this.sets[about.set];
    const first = data.changeAt(about.axis, about.from);
    const last = data.changeAt(about.axis, about.to);
    return momentOf(data, about.axis, data.peakIn(first, last));
  }

  protected who(about: Look & { keys: string[] }): Who {
    const data = this.sets[about.set];
    const pass = passes(data, about.only, about.moment);
    const all = totals(data, about.moment, pass);
    const wanted = this.search(about);
    const found = { bytes: all.bytes.slice(), counts: all.counts.slice() };
    if (wanted) {
      for (let kind = 0; kind < wanted.kinds.length; kind++) {
        if (!wanted.kinds[kind]) found.bytes[kind] = found.counts[kind] = 0;
      }
    }
    const tree = new Tree(about.keys, false, this.modules(about.set));
    tree.add(data, found);
    const shown = tree.finished();
    let rest = 0;
    if (about.moment.measure === "held" && about.only === "all") {
      rest = sum(data.levelsAt(about.moment.at)) - sum(all.bytes);
    }
    return {
      tree: shown,
      bytes: shown.bytes,
      count: shown.count,
      allBytes: sum(all.bytes) + rest,
      allCount: sum(all.counts),
      rest,
      largest: largestOf([{ data, found, sign: 1 }]),
    };
  }

  /** What each word of the search finds. */
  protected matched(about: Look): Matched[] {
    return this.search(about)?.matched ?? [];
  }

  protected hit(about: HitRequest): Bar | null {
    const data = this.sets[about.set];
    const window: Window = { axis: about.axis, from: about.from, to: about.to };
    const bars = this.bars(about, 0, 1);
    const { x, bytes, reachX, reachBytes } = about;
    const found = barAt(data, window, bars, x, bytes, reachX, reachBytes);
    return found < 0 ? null : this.bar({ set: about.set, allocation: found });
  }

  protected bar({ set, allocation }: { set: number; allocation: number }): Bar {
    const data = this.sets[set];
    const kind = data.kind[allocation];
    const { strings, texts } = data.words;
    const start = data.start[allocation];
    const end = data.end[allocation];
    const alike = this.alike(set)[kind];
    return {
      allocation,
      row: data.rowOf(allocation),
      texts: Object.fromEntries(texts.map((name) => [name, strings[data.text(name)[kind]]])),
      bytes: data.size[kind],
      block: data.block[kind],
      start_ns: start < 0 ? null : data.time[start],
      end_ns: end < data.changes ? data.time[end] : null,
      start,
      end,
      address: addressOf(data.facts, data.address[allocation]),
      atPeak: data.alive(allocation, data.facts.peak_change),
      alike,
      bottoms: this.bottoms(set, allocation),
    };
  }

  protected compare(about: { keys: string[]; before: Side; after: Side }): Comparison {
    const [old, now] = [about.before, about.after].map((side) => {
      const data = this.sets[side.set];
      const moment: Moment = { measure: "held", at: side.change, from: -1 };
      return { data, found: totals(data, moment, () => true), levels: data.levelsAt(side.change) };
    });
    const parts = [
      { ...old, sign: -1, names: namesBeside(old.data, now.data) },
      { ...now, sign: 1, names: namesBeside(now.data, old.data) },
    ];
    const paths = parts.flatMap(({ data, names }) =>
      pathsOf(data).map((path) => names("module", path)),
    );
    const tree = new Tree(about.keys, true, hierarchy(paths));
    for (const { data, found, sign, names } of parts) tree.add(data, found, sign, names);
    const inputs = old.data.words.categories.indexOf("inputs");
    return {
      tree: tree.finished(),
      largest: largestOf(parts),
      counts: [sum(old.found.counts), sum(now.found.counts)],
      inputs: [old.levels[inputs] ?? 0, now.levels[inputs] ?? 0],
    };
  }

  /** The largest bars that are alive at the moment and found: a table behind the picture. */
  protected rows(about: Look & { most: number }): Bar[] {
    const data = this.sets[about.set];
    const pass = passes(data, about.only, about.moment);
    const wanted = this.search(about);
    const found: number[] = [];
    data.overlapping(about.moment.at, about.moment.at, (i) => {
      if (pass(i) && (!wanted || wanted.kinds[data.kind[i]])) found.push(i);
    });
    found.sort((a, b) => data.sizeOf(b) - data.sizeOf(a));
    return found.slice(0, about.most).map((allocation) => this.bar({ set: about.set, allocation }));
  }

  // -------------------------------------------------------------- what is worth keeping

  private once<T>(key: string, make: () => T): T {
    if (!this.kept.has(key)) {
      if (this.kept.size > 24) this.kept.clear();
      this.kept.set(key, make());
    }
    return this.kept.get(key) as T;
  }

  /** How many allocations each kind has. */
  private alike(set: number): Uint32Array {
    return this.once(`alike ${set}`, () => {
      const data = this.sets[set];
      const counts = new Uint32Array(data.size.length);
      for (let i = 0; i < data.count; i++) counts[data.kind[i]]++;
      return counts;
    });
  }

  /** The rows of the model's tree for each path. */
  private modules(set: number): (path: string) => Level[] {
    return this.once(`modules ${set}`, () => hierarchy(pathsOf(this.sets[set])));
  }

  private coloring(look: Look): Coloring {
    return this.once(`color ${look.set} ${look.color}`, () =>
      coloring(this.sets[look.set], look.color, this.modules(look.set)),
    );
  }

  private search(look: Look): Found | null {
    return this.once(`search ${look.set} ${look.search}`, () =>
      search(this.sets[look.set], look.search),
    );
  }

  private lanes(look: Look): Lanes | null {
    const { layout, set } = look;
    if (layout === "address") return null;
    return this.once(`lanes ${set} ${layout}`, () =>
      lanes(this.sets[set], layout, this.modules(set)),
    );
  }

  private bottoms(set: number, allocation: number): Partial<Record<Layout, number>> {
    const data = this.sets[set];
    const found: Partial<Record<Layout, number>> = {
      address: data.address[allocation] * data.facts.address_unit,
    };
    for (const layout of ["category", "module"] as const) {
      const known = this.kept.get(`lanes ${set} ${layout}`) as Lanes | undefined;
      if (known) found[layout] = known.bottoms[allocation];
    }
    return found;
  }

  private highest(look: Look): number {
    const data = this.sets[look.set];
    return this.lanes(look)?.height ?? data.highest * data.facts.address_unit;
  }

  private bars(look: Look, low: number, high: number): Bars {
    const data = this.sets[look.set];
    const packed = this.lanes(look);
    const { ofKind, fadedOf } = this.kindColors(look);
    const pass = passes(data, look.only, look.moment);
    return {
      bottoms: packed ? packed.bottoms : data.address,
      unit: packed ? 1 : data.facts.address_unit,
      low,
      high,
      colorOf: ofKind,
      fadedOf,
      skip: look.only === "all" ? undefined : (i) => !pass(i),
      edge: look.dark ? 0xff161616 : 0xffffffff,
    };
  }

  private kindColors(look: Look): { ofKind: Uint32Array; fadedOf: Uint32Array } {
    const { set, dark } = look;
    return this.once(kindsKey(look), () => {
      const data = this.sets[set];
      const wanted = this.search(look);
      const hidden = data.words.categories.map((name) => look.hidden.includes(name));
      const plain = this.coloring(look).ofKind;
      const known = new Map([...new Set(plain)].map((color) => [color, faded(color, dark)]));
      const fadedOf = plain.map((color) => known.get(color) ?? color);
      const ofKind = plain.map((color, kind) => {
        if (hidden[data.category[kind]]) return 0;
        return wanted && !wanted.kinds[kind] ? fadedOf[kind] : color;
      });
      return { ofKind, fadedOf };
    });
  }
}

/** Works in slices, between which other questions are answered; null when it is no longer wanted. */
async function finish<T>(work: Generator<undefined, T>, wanted: () => boolean): Promise<T | null> {
  let until = performance.now() + SLICE_MS;
  for (;;) {
    const { done, value } = work.next();
    if (done) return value;
    if (performance.now() < until) continue;
    await pause();
    if (!wanted()) return null;
    until = performance.now() + SLICE_MS;
  }
}

/** Keeps the latest few. */
function keep<T>(kept: Map<string, T>, key: string, value: T): void {
  const [oldest] = kept.keys();
  if (kept.size >= MOST_WHOLE) kept.delete(oldest);
  kept.set(key, value);
}

/** Until the questions that have come meanwhile are answered. */
function pause(): Promise<void> {
  return new Promise((done) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => done();
    port2.postMessage(null);
  });
}

/** The paths of the modules that hold something at any time. */
function pathsOf(data: Dataset): string[] {
  return [...new Set(data.textOfGroups("module"))].map((text) => data.words.strings[text]);
}

/** Lines of libraries are said beside the program's own, where it calls some. */
function largestOf(parts: Part[]): Largest[] {
  const calls = parts.some(({ data }) => data.facts.calls_libraries);
  return largest(parts, calls ? [OWN_LINE, ...LARGEST_OF] : LARGEST_OF);
}

const kindsKey = ({ set, color, dark, hidden, search }: Look) =>
  `kinds ${set} ${color} ${dark} ${hidden} ${search}`;
const paintedKey = (look: DrawRequest) => {
  const moment = look.only === "grew" ? JSON.stringify(look.moment) : "";
  return `${numbersKey(look)} ${kindsKey(look)} ${look.only} ${moment}`;
};
const numbersKey = ({ set, layout, map }: DrawRequest) => `${set} ${layout} ${map.height}`;

function momentOf(data: Dataset, axis: Axis, change: number): MomentFacts {
  const levels = Array.from(data.levelsAt(change));
  return {
    change,
    x: data.xOf(axis, change),
    time_ns: data.xOf("time", change),
    levels,
    bytes: sum(levels),
  };
}

function addressOf(facts: Facts, place: number): string {
  const offset = place * facts.address_unit;
  let found = facts.regions[0];
  for (const region of facts.regions) if (region[1] <= offset) found = region;
  return found ? `0x${(found[0] + offset - found[1]).toString(16)}` : "";
}
