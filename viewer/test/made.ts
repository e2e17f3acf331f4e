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

const groupOf = ({ category, module, op }: Spec) => `${category} ${module} ${op}`;

/** By bytes, as Python packs numbers; without deflation. */
export function planes(numbers: number[]): Uint8Array {
  const wide = Math.ceil(Math.log2(Math.max(...numbers, 0) + 1) / 8);
  const bytes = Array.from({ length: wide }, (_, plane) =>
    numbers.map((number) => Math.floor(number / 256 ** plane) % 256),
  );
  return Uint8Array.from(bytes.flat());
}

export function columnsOf(made: Spec[]): { columns: Columns; facts: Partial<Facts> } {
  const changes = Math.max(...made.map((one) => one.end), 0);
  const begins = new Uint8Array(Math.ceil(changes / 8));
  for (const { start } of made) if (start >= 0) begins[start >> 3] |= 1 << (start & 7);
  const number = (text: string) => strings.indexOf(text);
  const groups = [...new Set(made.map(groupOf))];
  const column = (place: number) => groups.map((group) => number(group.split(" ")[place]));
  const each = made.map((_, i) => i); // each is its own kind
  const columns: Columns = {
    kind: planes(each),
    address: planes(made.map((one) => one.address)),
    life: planes(made.map((one) => one.end - one.start)),
    clock: planes(new Array(changes).fill(1000)),
    begins,
    row: new Uint8Array(0),
    group: planes(made.map((one) => groups.indexOf(groupOf(one)))),
    texts: planes([...column(0), ...column(1), ...column(2), ...groups.map(() => 0)]),
    sizes: planes(made.map((one) => one.size)),
    blocks: planes(made.map((one) => one.size + 1)),
    finding: planes(made.map((one) => (one.end === changes ? 2 : 0))),
  };
  const top = Math.max(...made.map((one) => one.address + one.size));
  const facts: Partial<Facts> = {
    shown: made.length,
    changes,
    kinds: made.length,
    groups: groups.length,
    begin_ns: 0,
    end_ns: changes * 1000,
    unit_ns: 1,
    before: made.filter((one) => one.start < 0).length,
    first_row: 0,
    peak_change: 0,
    regions: [[0, 0, top]],
    address_unit: 1,
    rest: null,
    aligned: { modules: {}, lines: {} },
  };
  return { columns, facts };
}

export function random(seed: number, changes = 90): { data: Dataset; made: Spec[] } {
  const made = specs(seed, changes);
  const { columns, facts } = columnsOf(made);
  return { data: new Dataset(facts as Facts, words, columns), made };
}
