// One device of one trace, unpacked: allocations, changes, kinds, and levels at every change.

import { asFloat64, asUint32, fromBase64, inflate } from "./decode";
import type { Facts, Words } from "./document";

const BLOCK = 256; // changes between two snapshots of the levels
const SKIP = 1024; // allocations of which the latest end is known, so that they can be passed over

export type Axis = "time" | "events";

export interface Columns {
  kind: Uint32Array;
  address: Uint32Array;
  life: Uint32Array;
  clock: Uint32Array;
  begins: Uint8Array;
  row: Uint32Array;
  kinds: Uint32Array;
  sizes: Float64Array;
  blocks: Float64Array;
}

export async function unpack(columns: Record<string, string>): Promise<Columns> {
  const opened = new Map(
    Object.entries(columns).map(([name, text]) => [name, inflate(fromBase64(text))]),
  );
  const raw = async (name: string) => (await opened.get(name)) ?? new Uint8Array(0);
  const numbers = async (name: string) => asUint32(await raw(name));
  return {
    kind: await numbers("kind"),
    address: await numbers("address"),
    life: await numbers("life"),
    clock: await numbers("clock"),
    begins: await raw("begins"),
    row: await numbers("row"),
    kinds: await numbers("kinds"),
    sizes: asFloat64(await raw("sizes")),
    blocks: asFloat64(await raw("blocks")),
  };
}

/** The first index whose value is greater. */
export function after(values: ArrayLike<number>, value: number, low = 0, high = values.length) {
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

export class Dataset {
  readonly count: number;
  readonly changes: number;
  readonly kind: Uint32Array;
  readonly address: Uint32Array;
  readonly start: Int32Array;
  readonly end: Int32Array;
  readonly startTime: Float64Array; // nanoseconds, of what is alive at the end: the end's
  readonly endTime: Float64Array;
  readonly row: Int32Array;
  readonly of: Uint32Array; // per change, the allocation
  readonly begins: Uint8Array; // per change, 1 where something begins
  readonly time: Float64Array; // per change, nanoseconds
  readonly size: Float64Array; // per kind
  readonly block: Float64Array; // per kind; -1: not known
  readonly category: Uint8Array; // per kind
  readonly latestEnd: Int32Array; // per run of SKIP allocations
  readonly highest: number; // the largest address in use, in units
  private readonly texts = new Map<string, Uint32Array>();
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
    this.count = columns.kind.length;
    this.changes = columns.clock.length;
    this.kind = columns.kind;
    this.address = columns.address;
    this.size = columns.sizes;
    this.block = columns.blocks;
    this.categories = words.categories.length;
    const kinds = columns.sizes.length;
    words.texts.forEach((name, i) => {
      this.texts.set(name, columns.kinds.subarray(i * kinds, (i + 1) * kinds));
    });
    this.category = this.categoriesOfKinds();
    this.time = this.times(columns.clock);
    this.begins = new Uint8Array(this.changes);
    this.of = new Uint32Array(this.changes);
    this.start = new Int32Array(this.count);
    this.end = new Int32Array(this.count);
    this.startTime = new Float64Array(this.count);
    this.endTime = new Float64Array(this.count);
    this.row = new Int32Array(this.count);
    this.latestEnd = new Int32Array(Math.ceil(this.count / SKIP));
    this.placeInTime(columns);
    this.highest = this.highestAddress();
    const blocks = Math.ceil(this.changes / BLOCK) + 1;
    this.levels = new Float64Array(blocks * this.categories);
    this.blockPeak = new Float64Array(blocks).fill(-1);
    this.blockPeakAt = new Int32Array(blocks);
    this.total = new Float64Array(this.changes);
    this.addUp();
  }

  /** Per kind, the text's place in the table of strings. */
  text(name: string): Uint32Array {
    const found = this.texts.get(name);
    if (!found) throw new Error(`kinds have no ${name}`);
    return found;
  }

  sizeOf(allocation: number): number {
    return this.size[this.kind[allocation]];
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
    this.runs(first, last, (begin, stop) => {
      for (let i = begin; i < stop; i++) if (this.end[i] > first) each(i);
    });
  }

  /** Stretches of allocations that begin by `last`, and of which some may end after `first`. */
  runs(first: number, last: number, each: (begin: number, stop: number) => void): void {
    const until = after(this.start, last);
    for (let run = 0; run * SKIP < until; run++) {
      if (this.latestEnd[run] > first) each(run * SKIP, Math.min(until, (run + 1) * SKIP));
    }
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

  private restTotal(change: number): number {
    const rest = this.facts.rest;
    if (!rest) return 0;
    const at = Math.max(after(rest.at, change) - 1, 0);
    return Object.values(rest.levels).reduce((total, values) => total + values[at], 0);
  }

  private categoriesOfKinds(): Uint8Array {
    const number = new Map(this.words.categories.map((name, i) => [name, i]));
    const unknown = number.get("unknown") ?? 0;
    const texts = this.text("category");
    const found = new Uint8Array(texts.length);
    for (let i = 0; i < texts.length; i++) {
      found[i] = number.get(this.words.strings[texts[i]]) ?? unknown;
    }
    return found;
  }

  private times(clock: Uint32Array): Float64Array {
    const times = new Float64Array(clock.length);
    let units = 0;
    for (let k = 0; k < clock.length; k++) {
      units += clock[k];
      times[k] = this.facts.begin_ns + units * this.facts.unit_ns;
    }
    return times;
  }

  private placeInTime(columns: Columns): void {
    const { begins, life, row } = columns;
    let next = this.facts.before;
    this.start.fill(-1, 0, next);
    for (let k = 0; k < this.changes; k++) {
      if (!((begins[k >> 3] >> (k & 7)) & 1)) continue;
      this.begins[k] = 1;
      this.of[k] = next;
      this.start[next++] = k;
    }
    let number = this.facts.first_row;
    for (let i = 0; i < this.count; i++) {
      const end = this.start[i] + life[i];
      this.end[i] = end;
      if (end < this.changes) this.of[end] = i;
      this.startTime[i] = this.xOf("time", this.start[i]);
      this.endTime[i] = this.xOf("time", end);
      number += row[i] | 0;
      this.row[i] = number;
      const run = Math.floor(i / SKIP);
      if (end > this.latestEnd[run]) this.latestEnd[run] = end;
    }
  }

  private highestAddress(): number {
    const regions = this.facts.regions;
    if (regions.length === 0) return 1;
    const [, offset, length] = regions[regions.length - 1];
    return Math.max(Math.ceil((offset + length) / this.facts.address_unit), 1);
  }

  private addUp(): void {
    const levels = new Float64Array(this.categories);
    for (let i = 0; i < this.facts.before; i++) {
      levels[this.category[this.kind[i]]] += this.sizeOf(i);
    }
    let total = sum(levels);
    for (let k = 0; k < this.changes; k++) {
      const block = Math.floor(k / BLOCK);
      if (k % BLOCK === 0) this.levels.set(levels, block * this.categories);
      const kind = this.kind[this.of[k]];
      const amount = this.begins[k] ? this.size[kind] : -this.size[kind];
      levels[this.category[kind]] += amount;
      total += amount;
      const whole = this.facts.rest ? total + this.restTotal(k) : total;
      this.total[k] = whole;
      if (whole > this.blockPeak[block]) {
        this.blockPeak[block] = whole;
        this.blockPeakAt[block] = k;
      }
    }
    // Where the changes end with a block, the state after them is the next block's.
    if (this.changes % BLOCK === 0) {
      this.levels.set(levels, (this.changes / BLOCK) * this.categories);
    }
  }
}

export function sum(values: ArrayLike<number>): number {
  let total = 0;
  for (let i = 0; i < values.length; i++) total += values[i];
  return total;
}
