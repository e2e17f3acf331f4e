// Another way to lay allocations out than by address: each group (a category, a module) has a room
// of its own, as high as the group ever needs, and in it blocks take the first gap that fits.

import { type Dataset, uint32 } from "./dataset";
import { joined, type Level } from "./folded";
import { nameless } from "./tree";

export interface Lane {
  name: string;
  bottom: number;
  height: number;
}

export interface Lanes {
  bottoms: Float64Array; // per allocation, bytes
  lanes: Lane[];
  height: number;
}

const MOST_GAPS = 64; // looked at before a block goes on top

class Room {
  private begins: number[] = []; // of the gaps, by address
  private sizes: number[] = [];
  private top = 0;
  height = 0;

  take(size: number): number {
    const until = Math.min(this.begins.length, MOST_GAPS);
    for (let i = 0; i < until; i++) {
      if (this.sizes[i] < size) continue;
      const begin = this.begins[i];
      this.begins[i] += size;
      this.sizes[i] -= size;
      if (this.sizes[i] === 0) this.remove(i);
      return begin;
    }
    const begin = this.top;
    this.top += size;
    this.height = Math.max(this.height, this.top);
    return begin;
  }

  give(begin: number, size: number): void {
    let at = 0;
    let high = this.begins.length;
    while (at < high) {
      const middle = (at + high) >>> 1;
      if (this.begins[middle] < begin) at = middle + 1;
      else high = middle;
    }
    const joinsNext = at < this.begins.length && this.begins[at] === begin + size;
    const joinsLast = at > 0 && this.begins[at - 1] + this.sizes[at - 1] === begin;
    if (joinsNext) {
      this.begins[at] = begin;
      this.sizes[at] += size;
    }
    if (joinsLast) {
      this.sizes[at - 1] += joinsNext ? this.sizes[at] : size;
      if (joinsNext) this.remove(at);
    }
    if (!joinsNext && !joinsLast) {
      this.begins.splice(at, 0, begin);
      this.sizes.splice(at, 0, size);
    }
    const last = this.begins.length - 1;
    if (last >= 0 && this.begins[last] + this.sizes[last] === this.top) {
      this.top = this.begins[last];
      this.remove(last);
    }
  }

  private remove(at: number): void {
    this.begins.splice(at, 1);
    this.sizes.splice(at, 1);
  }
}

export type Modules = (path: string) => Level[];

/** Each kind's group: its text, or the row of its module in the model's tree. */
export function groups(data: Dataset, key: string, modules?: Modules): [Uint32Array, string[]] {
  const names: string[] = [];
  const numbers = new Map<string, number>();
  const known = new Map<number, number>();
  const numberOf = (text: number) => {
    const said = data.words.strings[text];
    const name = key === "module" && modules && said ? joined(modules(said)) : said;
    const number = numbers.get(name) ?? names.push(name) - 1;
    numbers.set(name, number);
    known.set(text, number);
    return number;
  };
  const texts = data.text(key);
  const of = uint32(texts.length, (kind) => known.get(texts[kind]) ?? numberOf(texts[kind]));
  return [of, names];
}

/** The groups that need most are the lowest. */
export function lanes(data: Dataset, key: "category" | "module", modules?: Modules): Lanes {
  const [texts, names] = groups(data, key, modules);
  const rooms = new Map<number, Room>();
  const bottoms = new Float64Array(data.count);
  const take = (i: number) => {
    const text = texts[data.kind[i]];
    let room = rooms.get(text);
    if (!room) {
      room = new Room();
      rooms.set(text, room);
    }
    bottoms[i] = room.take(data.sizeOf(i));
  };
  for (let i = 0; i < data.facts.before; i++) take(i);
  for (let k = 0; k < data.changes; k++) {
    const i = data.of[k];
    if (data.begins[k]) take(i);
    else rooms.get(texts[data.kind[i]])?.give(bottoms[i], data.sizeOf(i));
  }
  const order = [...rooms].sort((a, b) => b[1].height - a[1].height);
  const starts = new Map<number, number>();
  const found: Lane[] = [];
  let height = 0;
  for (const [text, room] of order) {
    starts.set(text, height);
    const name = names[text] || nameless(key);
    found.push({ name, bottom: height, height: room.height });
    height += room.height;
  }
  for (let i = 0; i < data.count; i++) bottoms[i] += starts.get(texts[data.kind[i]]) ?? 0;
  return { bottoms, lanes: found, height: Math.max(height, 1) };
}
