// Which kinds a search finds. Each of its words has to be found in one of a kind's texts:
//   mm            a whole word of any text, such as aten::mm, and not of _log_softmax
//   op:mm         the same, of the op only;  op:*mm*  also inside of words
//   module:h.0    whole parts of a path: transformer.h.0 and transformer.h.0.mlp
//   op=aten::mm   the whole text;  module=h.*.mlp.**  any layer's mlp, and all within it
//   ^op:aten::a   a regular expression, if it begins with ^ or ends with $

import type { Dataset } from "./dataset";

/** The texts that are looked at where a word names none. */
export const SEARCHED = [
  ...["category", "module", "op", "line", "phase"],
  ...["role", "name", "shape", "dtype"],
];
const MOST_SHOWN = 4; // texts that are named as found by a word

export interface Wanted {
  word: string;
  keys: string[];
  test: (text: string) => boolean;
}

/** What a word of a search has found. */
export interface Matched {
  word: string;
  texts: string[]; // the first of them, as "op aten::mm"
  count: number;
}

export interface Found {
  kinds: Uint8Array; // 1 for each kind that is found
  matched: Matched[];
}

export function escaped(text: string): string {
  return text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&").replace(/\s/g, "\\s");
}

/** The words of a search; "a b" in quotes is one. */
export function wordsOf(query: string): string[] {
  return query.match(/(?:[^\s"]|"[^"]*")+|"\S*/g) ?? [];
}

export function wanted(word: string, texts: readonly string[]): Wanted | null {
  const [, anchor, key, sign, rest] = /^(\^?)(?:(\w+)([:=]))?(.*)$/s.exec(word) ?? [];
  const named = key !== undefined && texts.includes(key);
  const keys = named ? [key] : texts.filter((text) => SEARCHED.includes(text));
  const value = named ? rest : word.slice(anchor.length);
  if (anchor || (word.endsWith("$") && word.length > 1)) {
    const expression = regular(`${anchor}${value}`);
    return { word, keys, test: (text) => expression.test(text) };
  }
  const bare = value.replaceAll('"', "");
  if (named && sign === "=") return { word, keys, test: whole(bare) };
  if (!bare) return null; // somebody is still typing
  const expression = inWords(bare);
  return { word, keys, test: (text) => expression.test(text) };
}

function regular(text: string): RegExp {
  try {
    return new RegExp(text, "i");
  } catch {
    return new RegExp(escaped(text), "i");
  }
}

/** The value as whole words: nothing that belongs to a word is beside it. */
function inWords(value: string): RegExp {
  const inside = value.split("*").map(escaped).join("\\S*");
  const before = /^\w/.test(value) ? "(?<!\\w)" : "";
  const behind = /\w$/.test(value) ? "(?!\\w)" : "";
  return new RegExp(`${before}${inside}${behind}`, "i");
}

/** The whole text; in a path, * is any number, {1,2} one of these, and .** what is within. */
function whole(value: string): (text: string) => boolean {
  if (!/[*{]/.test(value)) return (text) => text === value;
  const path = value.replace(/\.\*\*$/, "");
  const parts = escaped(path)
    .replace(/\\\*/g, "\\d+")
    .replace(/\\\{([\d,]+)\\\}/g, (_, numbers: string) => `(${numbers.replaceAll(",", "|")})`);
  const expression = new RegExp(`^${parts}${path === value ? "" : "(\\..*)?"}$`);
  return (text) => text === value || expression.test(text);
}

/** What is found, and by which texts; null where nothing is searched for. */
export function search(data: Dataset, query: string): Found | null {
  const words = wordsOf(query).flatMap((word) => wanted(word, data.words.texts) ?? []);
  if (words.length === 0) return null;
  const each = words.map((word) => matches(data, word));
  const ofGroups = each[0].groups.map((_, group) =>
    Number(each.every(({ groups }) => groups[group])),
  );
  const kinds = new Uint8Array(data.group.length);
  for (let kind = 0; kind < kinds.length; kind++) kinds[kind] = ofGroups[data.group[kind]];
  return { kinds, matched: each.map(({ matched }) => matched) };
}

/** 1 for each group of kinds with such a text. */
function matches(
  data: Dataset,
  { word, keys, test }: Wanted,
): { groups: Uint8Array; matched: Matched } {
  const groups = new Uint8Array(data.facts.groups);
  const matched: Matched = { word, texts: [], count: 0 };
  for (const name of keys) {
    const texts = data.textOfGroups(name);
    const known = new Map<number, boolean>();
    for (let group = 0; group < groups.length; group++) {
      const text = texts[group];
      let is = known.get(text);
      if (is === undefined) {
        const said = data.words.strings[text];
        is = test(said);
        known.set(text, is);
        if (is && matched.count++ < MOST_SHOWN)
          matched.texts.push(`${name} ${said || "not known"}`);
      }
      if (is) groups[group] = 1;
    }
  }
  return { groups, matched };
}
