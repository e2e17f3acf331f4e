// Random data sets, and what they were made from.

import { type Columns, Dataset } from "../src/dataset";
import type { Facts } from "../src/document";

export interface Spec {
  start: number;
  end: number;
  size: number;
  category: string;
  module: string;
  op: string;
  address: number;
}

const strings = ["", "weights", "activations", "unknown", "m0", "m1", "m2", "op0", "op1", "op2"];
const texts = ["category", "module", "op", "line"];
export const words = {
  strings,
  texts,
  categories: ["weights", "activations", "unknown"],
  phases: ["other"],
  colors: { weights: "#111111", activations: "#222222", unknown: "#333333" },
};

/** Every change is of one allocation; those before the trace come first. */
export function specs(seed: number, changes: number): Spec[] {
  let state = seed * 2654435761;
  const next = (below: number) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
  const made: Spec[] = [];
  let top = 0;
  const make = (start: number) => {
    const size = 10 + next(1000);
    made.push({
      start,
      end: changes,
      size,
      category: words.categories[next(3)],
      module: `m${next(3)}`,
      op: `op${next(3)}`,
      address: top,
    });
    top += size;
  };
  for (let i = 0; i < 4; i++) make(-1);
  for (let k = 0; k < changes; k++) {
    const open = made.filter((one) => one.end === changes);
    if (open.length > 0 && next(2)) open[next(open.length)].end = k;
    else make(k);
  }
  return made;
}

export function columnsOf(made: Spec[]): { columns: Columns; facts: Partial<Facts> } {
  const changes = Math.max(...made.map((one) => one.end), 0);
  const begins = new Uint8Array(Math.ceil(changes / 8));
  for (const { start } of made) if (start >= 0) begins[start >> 3] |= 1 << (start & 7);
  const number = (text: string) => strings.indexOf(text);
  const column = (key: "category" | "module" | "op") => made.map((one) => number(one[key]));
  const size = Float64Array.from(made, (one) => one.size);
  const columns: Columns = {
    kind: Uint32Array.from(made, (_, i) => i), // each its own
    address: Uint32Array.from(made, (one) => one.address),
    life: Uint32Array.from(made, (one) => one.end - one.start),
    clock: new Uint32Array(changes).fill(1000),
    begins,
    row: new Uint32Array(made.length),
    kinds: Uint32Array.from([
      ...column("category"),
      ...column("module"),
      ...column("op"),
      ...made.map(() => 0),
    ]),
    sizes: size,
    blocks: size,
  };
  const top = Math.max(...made.map((one) => one.address + one.size));
  const facts: Partial<Facts> = {
    begin_ns: 0,
    end_ns: changes * 1000,
    unit_ns: 1,
    before: made.filter((one) => one.start < 0).length,
    first_row: 0,
    peak_change: 0,
    regions: [[0, 0, top]],
    address_unit: 1,
    rest: null,
  };
  return { columns, facts };
}

export function random(seed: number, changes = 90): { data: Dataset; made: Spec[] } {
  const made = specs(seed, changes);
  const { columns, facts } = columnsOf(made);
  return { data: new Dataset(facts as Facts, words, columns), made };
}
