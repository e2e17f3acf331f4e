// The model as a tree: the paths of its modules, with layers that are alike as one row.

import { escaped } from "./search";

/** One row of the tree: what it is called, and the search that finds exactly what is in it. */
export interface Level {
  name: string;
  word: string;
}

interface Plain {
  own: boolean; // itself a module that holds something, not only a part of a path
  children: Map<string, Plain>;
}

interface Branch {
  label: string;
  pattern: string; // a path, in which * stands for any number
  own: boolean;
  children: Branch[];
  of: Map<string, Branch>; // the next part of a path, and where it leads
  member?: Map<string, Branch>; // of leaves that are alike: each of them
}

const MOST_APART = 4; // numbered leaves beside each other that keep their own rows
const MOST_BARE = 8; // children of a Sequential that are named one by one
const NUMBER = /^(\d+|\[\d+\])$/;
export const ITSELF = "itself";

const plain = (): Plain => ({ own: false, children: new Map() });

/** For each path the rows that it is below, the outermost first. */
export function hierarchy(paths: Iterable<string>): (path: string) => Level[] {
  const root = plain();
  for (const path of paths) if (path) plant(root, path.split("."));
  const top = grown([root], "", "");
  const known = new Map<string, Level[]>();
  return (path) => {
    let found = known.get(path);
    if (!found) {
      found = levels(top, path);
      known.set(path, found);
    }
    return found;
  };
}

function plant(root: Plain, parts: string[]): void {
  let at = root;
  for (const part of parts) {
    let next = at.children.get(part);
    if (!next) {
      next = plain();
      at.children.set(part, next);
    }
    at = next;
  }
  at.own = true;
}

/** One branch for places that are alike. */
function grown(places: Plain[], label: string, pattern: string): Branch {
  const branch: Branch = {
    label,
    pattern,
    own: places.some((place) => place.own),
    children: [],
    of: new Map(),
  };
  const parts = new Map<string, Plain[]>();
  for (const place of places) {
    for (const [part, child] of place.children)
      parts.set(part, [...(parts.get(part) ?? []), child]);
  }
  const numbered = [...parts.keys()].filter((part) => NUMBER.test(part));
  const isLeaf = (part: string) => parts.get(part)?.every((one) => one.children.size === 0);
  const layers = numbered.filter((part) => !isLeaf(part));
  const leaves = numbered.filter(isLeaf);
  const below = (part: string) => (pattern ? `${pattern}.${part}` : part);
  const add = (child: Branch, own: string[]) => {
    branch.children.push(child);
    for (const part of own) branch.of.set(part, child);
  };
  const fold = (own: string[]) => {
    const all = own.flatMap((part) => parts.get(part) ?? []);
    const child = grown(all, numbersText(own), below(numbersPattern(own, numbered)));
    add(child, own);
    return child;
  };
  if (layers.length > 1) fold(layers);
  if (leaves.length > MOST_APART) {
    const each = leaves.map((part): [string, Branch] => [
      part,
      grown(parts.get(part) ?? [], part, below(part)),
    ]);
    fold(leaves).member = new Map(each);
  }
  for (const [part, own] of parts) {
    if (!branch.of.has(part)) add(grown(own, part, below(part)), [part]);
  }
  return branch;
}

function levels(top: Branch, path: string): Level[] {
  if (!path) return [{ name: "", word: 'module=""' }];
  const found: Level[] = [];
  let at = top;
  let label = "";
  for (const part of path.split(".")) {
    const next = at.of.get(part);
    if (!next) return [{ name: path, word: exactly("module", path) }];
    const member = next.member?.get(part);
    // Two runs of numbers would be a puzzle: "down.0-2", not "down.0-2.0-5".
    const isSecond = member && /^\[?\d/.test(at.label);
    if (!label || !isSecond) label = label ? `${label}.${next.label}` : next.label;
    // A part of a path that leads to only one place shares its row.
    if (next.own || next.children.length !== 1) {
      found.push({ name: label, word: within(next) });
      label = "";
    }
    if (member) found.push({ name: member.label, word: within(member) });
    at = next;
  }
  if (at.children.length) found.push({ name: ITSELF, word: exactly("module", at.pattern) });
  return found;
}

const within = ({ pattern, children }: Branch) =>
  exactly("module", children.length ? `${pattern}.**` : pattern);

/** A word of a search for exactly this text. */
export function exactly(key: string, text: string): string {
  if (text.includes('"')) return `^${key}:${escaped(text)}$`;
  return /^[^\s"]+$/.test(text) ? `${key}=${text}` : `${key}="${text}"`;
}

/** What differs only in the numbers of layers, under one name, as in the terminal. */
export function alike(paths: string[]): (path: string) => Level {
  const bare = paths.filter((path) => NUMBER.test(path)); // children of a Sequential without a name
  const together = numbersText(bare);
  return (path) => {
    if (NUMBER.test(path)) {
      const isAlone = bare.length <= MOST_BARE;
      const all = path.startsWith("[") ? "[*]" : "*";
      return { name: isAlone ? path : together, word: exactly("module", isAlone ? path : all) };
    }
    const parts = path.split(".").map((part) => (NUMBER.test(part) ? "*" : part));
    const pattern = parts.join(".");
    const name = parts.every((part) => part === "*") ? "all layers" : pattern;
    return { name, word: exactly("module", pattern) };
  };
}

/** The rows as one name: layers.0-11.mlp. */
export const joined = (rows: Level[]) =>
  rows
    .map((row) => row.name)
    .filter((name) => name !== ITSELF)
    .join(".");

/** A search for exactly what shares this name. */
export const wordOf = (rows: Level[]) => {
  const last = rows[rows.length - 1];
  return last.name === ITSELF ? rows[rows.length - 2].word : last.word;
};

const numberOf = (part: string) => Number(part.replace(/\D/g, ""));

function numbersText(parts: string[]): string {
  const numbers = parts.map(numberOf).sort((a, b) => a - b);
  const [first, last] = [numbers[0] ?? 0, numbers[numbers.length - 1] ?? 0];
  const whole = last - first + 1 === numbers.length;
  const text = whole
    ? `${first}-${last}`
    : numbers.length <= MOST_APART
      ? numbers.join(", ")
      : `${first} ... ${last}`;
  return parts[0]?.startsWith("[") ? `[${text}]` : text;
}

function numbersPattern(own: string[], all: string[]): string {
  const inside = own.length === all.length ? "*" : `{${own.map(numberOf).join(",")}}`;
  return own[0].startsWith("[") ? `[${inside}]` : inside;
}
