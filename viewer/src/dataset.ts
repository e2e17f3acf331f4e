// One device of one trace, unpacked: allocations, changes, kinds, and levels at every change.

import { asNumbers, asUint32, unfolded } from "./decode";
import type { Facts, Words } from "./document";

const BLOCK = 64; // changes between two snapshots of the levels
const SKIP = 1024; // allocations of which the latest end is known, so that they can be passed over

export type Axis = "time" | "events";

/** The columns of bytes that Python packed. */
export const COLUMNS = [
  ...(["kind", "address", "life", "clock", "begins", "row"] as const),
  ...(["group", "texts", "sizes", "blocks", "finding"] as const),
];
export type Columns = Record<(typeof COLUMNS)[number], Uint8Array>;

/** The first index whose value is greater. */
export function after(values: ArrayLike<number>, value: number, low = 0, high = values.length) {
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Numbers that are made one by one: as `Uint32Array.from` does it, but many times faster. */
export function uint32(count: number, make: (i: number) => number): Uint32Array<ArrayBuffer> {
  const found = new Uint32Array(count);
  for (let i = 0; i < count; i++) found[i] = make(i);
  return found;
}

export class Dataset {
  readonly count: number;
  readonly changes: number;
  readonly kind: Uint32Array;
  readonly address: Uint32Array;
  readonly start: Int32Array;
  readonly end: Int32Array;
  readonly of: Uint32Array; // per change, the allocation
  readonly finding: Uint32Array; // a bit for each finding that the allocation belongs to
  readonly begins: Uint8Array; // per change, 1 where something begins
  readonly time: Float64Array; // per change, nanoseconds
  readonly size: Float64Array; // per kind
  readonly block: Float64Array; // per kind; -1: not known
  readonly group: Uint32Array; // per kind: those of one group have the same texts
  readonly category: Uint8Array; // per kind
  readonly latestEnd: Int32Array; // per run of SKIP allocations
  readonly highest: number; // the largest address in use, in units
  private readonly ofGroups = new Map<string, Uint32Array>();
  private readonly ofKinds = new Map<string, Uint32Array>();
  private readonly rows: Int32Array | null; // null: one after the other
  private readonly total: Float64Array; // per change, bytes after it
  private readonly levels: Float64Array; // per block of changes and category, before the block
  private readonly blockPeak: Float64Array; // per block, the highest total after one of its changes
  private readonly blockPeakAt: Int32Array;
  private readonly categories: number;

  constructor(
    readonly facts: Facts,
    readonly words: Words,
    columns: Columns,
  ) {
    this.count = facts.shown;
    this.changes = facts.changes;
    this.kind = asUint32(columns.kind, this.count);
    this.address = asUint32(columns.address, this.count);
    this.finding = asUint32(columns.finding, this.count);
    this.size = asNumbers(columns.sizes, facts.kinds);
    this.block = asNumbers(columns.blocks, facts.kinds).map((bytes) => bytes - 1);
    this.group = asUint32(columns.group, facts.kinds);
    this.categories = words.categories.length;
    const { groups } = facts;
    const texts = asUint32(columns.texts, words.texts.length * groups);
    words.texts.forEach((name, i) => {
      this.ofGroups.set(name, texts.subarray(i * groups, (i + 1) * groups));
    });
    this.category = this.categoriesOfKinds();
    this.time = this.times(asUint32(columns.clock, this.changes));
    this.begins = new Uint8Array(this.changes);
    this.of = new Uint32Array(this.changes);
    this.start = new Int32Array(this.count);
    this.end = new Int32Array(this.count);
    this.latestEnd = new Int32Array(Math.ceil(this.count / SKIP));
    this.placeInTime(columns);
    this.rows = columns.row.length ? this.rowsOf(asUint32(columns.row, this.count)) : null;
    this.highest = this.highestAddress();
    const blocks = Math.ceil(this.changes / BLOCK) + 1;
    this.levels = new Float64Array(blocks * this.categories);
    this.blockPeak = new Float64Array(blocks).fill(-1);
    this.blockPeakAt = new Int32Array(blocks);
    this.total = new Float64Array(this.changes);
    this.addUp();
  }

  /** Per group of kinds, the text's place in the table of strings. */
  textOfGroups(name: string): Uint32Array {
    const found = this.ofGroups.get(name);
    if (!found) throw new Error(`kinds have no ${name}`);
    return found;
  }

  /** The same per kind. */
  text(name: string): Uint32Array {
    let found = this.ofKinds.get(name);
    if (!found) {
      const texts = this.textOfGroups(name);
      found = this.group.map((group) => texts[group]);
      this.ofKinds.set(name, found);
    }
    return found;
  }

  sizeOf(allocation: number): number {
    return this.size[this.kind[allocation]];
  }

  /** The allocation's row in Python's table. */
  rowOf(allocation: number): number {
    return this.rows ? this.rows[allocation] : this.facts.first_row + allocation;
  }

  /** The last change at this time, -1 before the first. */
  changeAt(axis: Axis, x: number): number {
    if (axis === "events") return Math.max(-1, Math.min(this.changes - 1, Math.floor(x)));
    return after(this.time, x) - 1;
  }

  xOf(axis: Axis, change: number): number {
    if (axis === "events") return change;
    if (change < 0) return this.facts.begin_ns;
    return change < this.changes ? this.time[change] : this.facts.end_ns;
  }

  bounds(axis: Axis): [number, number] {
    if (axis === "events") return [-1, Math.max(this.changes, 1)];
    return [this.facts.begin_ns, Math.max(this.facts.end_ns, this.facts.begin_ns + 1)];
  }

  /** Bytes per category after the change. */
  levelsAt(change: number, into = new Float64Array(this.categories)): Float64Array {
    const block = Math.floor((change + 1) / BLOCK);
    const from = block * this.categories;
    for (let c = 0; c < this.categories; c++) into[c] = this.levels[from + c];
    for (let k = block * BLOCK; k <= change; k++) this.apply(into, k);
    this.addRest(into, change);
    return into;
  }

  /** The change in [first, last] after which most is allocated; the first of equals. */
  peakIn(first: number, last: number): number {
    let best = first;
    let most = this.totalAt(first);
    let k = first + 1;
    while (k <= last) {
      const block = Math.floor(k / BLOCK);
      const stop = Math.min(last + 1, (block + 1) * BLOCK);
      if (this.blockPeak[block] <= most) {
        k = stop;
      } else if (k === block * BLOCK && stop === k + BLOCK) {
        most = this.blockPeak[block];
        best = this.blockPeakAt[block];
        k = stop;
      } else {
        for (; k < stop; k++) {
          if (this.total[k] > most) {
            most = this.total[k];
            best = k;
          }
        }
      }
    }
    return best;
  }

  /** Bytes after the change. */
  totalAt(change: number): number {
    return change < 0 ? sum(this.levelsAt(-1)) : this.total[change];
  }

  /** Calls back for each allocation that is alive after some change in [first, last]. */
  overlapping(first: number, last: number, each: (allocation: number) => void): void {
    for (const [begin, stop] of this.runs(first, last)) {
      for (let i = begin; i < stop; i++) if (this.end[i] > first) each(i);
    }
  }

  /** Stretches of allocations that begin by `last`, and of which some may end after `first`. */
  runs(first: number, last: number): [begin: number, stop: number][] {
    const until = after(this.start, last);
    const found: [number, number][] = [];
    for (let run = 0; run * SKIP < until; run++) {
      if (this.latestEnd[run] > first) found.push([run * SKIP, Math.min(until, (run + 1) * SKIP)]);
    }
    return found;
  }

  alive(allocation: number, change: number): boolean {
    return this.start[allocation] <= change && this.end[allocation] > change;
  }

  private apply(levels: Float64Array, change: number): void {
    const kind = this.kind[this.of[change]];
    levels[this.category[kind]] += this.begins[change] ? this.size[kind] : -this.size[kind];
  }

  /** What is in no allocation of this page: Python knows its sums at some changes. */
  private addRest(levels: Float64Array, change: number): void {
    const rest = this.facts.rest;
    if (!rest) return;
    const at = Math.max(after(rest.at, change) - 1, 0);
    for (const [name, values] of Object.entries(rest.levels)) {
      levels[this.words.categories.indexOf(name)] += values[at];
    }
  }

  /** The same for all categories together, per moment that Python wrote down. */
  private restTotals(): number[] {
    const { at, levels } = this.facts.rest ?? { at: [], levels: {} };
    return at.map((_, i) => sum(Object.values(levels).map((values) => values[i])));
  }

  private categoriesOfKinds(): Uint8Array {
    const number = new Map(this.words.categories.map((name, i) => [name, i]));
    const unknown = number.get("unknown") ?? 0;
    const texts = this.textOfGroups("category");
    const found = new Uint8Array(this.group.length);
    const ofGroups = uint32(
      texts.length,
      (i) => number.get(this.words.strings[texts[i]]) ?? unknown,
    );
    for (let kind = 0; kind < found.length; kind++) found[kind] = ofGroups[this.group[kind]];
    return found;
  }

  private times(clock: Uint32Array): Float64Array {
    const { begin_ns, unit_ns } = this.facts;
    const times = new Float64Array(clock.length);
    let units = 0;
    for (let k = 0; k < clock.length; k++) {
      units += clock[k];
      times[k] = begin_ns + units * unit_ns;
    }
    return times;
  }

  private placeInTime(columns: Columns): void {
    const { start, end, of, changes, count } = this;
    const { before } = this.facts;
    const { begins } = columns;
    const life = asUint32(columns.life, count);
    let next = before;
    start.fill(-1, 0, next);
    for (let k = 0; k < changes; k++) {
      if (!((begins[k >> 3] >> (k & 7)) & 1)) continue;
      this.begins[k] = 1;
      of[k] = next;
      start[next++] = k;
    }
    for (let i = 0; i < count; i++) {
      const last = start[i] + life[i];
      end[i] = last;
      if (last < changes) of[last] = i;
      const run = (i / SKIP) | 0;
      if (last > this.latestEnd[run]) this.latestEnd[run] = last;
    }
  }

  private rowsOf(steps: Uint32Array): Int32Array {
    let row = this.facts.first_row - 1;
    const found = new Int32Array(steps.length);
    for (let i = 0; i < steps.length; i++) {
      row += unfolded(steps[i]) + 1;
      found[i] = row;
    }
    return found;
  }

  private highestAddress(): number {
    const regions = this.facts.regions;
    if (regions.length === 0) return 1;
    const [, offset, length] = regions[regions.length - 1];
    return Math.max(Math.ceil((offset + length) / this.facts.address_unit), 1);
  }

  private addUp(): void {
    const { kind: kinds, of, begins, size, category, total: totals, facts, changes } = this;
    const levels = new Float64Array(this.categories);
    for (let i = 0; i < facts.before; i++) levels[category[kinds[i]]] += size[kinds[i]];
    let total = sum(levels);
    const at = facts.rest?.at ?? [];
    const rests = this.restTotals();
    let rest = 0; // the place of the moment of the rest that holds
    for (let from = 0, block = 0; from < changes; from += BLOCK, block++) {
      this.levels.set(levels, block * this.categories);
      const stop = Math.min(from + BLOCK, changes);
      let [most, best] = [-1, 0];
      for (let k = from; k < stop; k++) {
        const kind = kinds[of[k]];
        const amount = begins[k] ? size[kind] : -size[kind];
        levels[category[kind]] += amount;
        total += amount;
        while (rest + 1 < at.length && at[rest + 1] <= k) rest++;
        const whole = rests.length ? total + rests[rest] : total;
        totals[k] = whole;
        if (whole > most) {
          most = whole;
          best = k;
        }
      }
      this.blockPeak[block] = most;
      this.blockPeakAt[block] = best;
    }
    // Where the changes end with a block, the state after them is the next block's.
    if (changes % BLOCK === 0) this.levels.set(levels, (changes / BLOCK) * this.categories);
  }
}

export function sum(values: ArrayLike<number>): number {
  let total = 0;
  for (let i = 0; i < values.length; i++) total += values[i];
  return total;
}
