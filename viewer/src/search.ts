// Which kinds a search finds: words that are regular expressions, each of which has to be found in
// one of a kind's texts, written as "module:h.0", "op:aten::mm", "line:train.py:12".

import type { Dataset } from "./dataset";

export function expression(word: string): RegExp {
  try {
    return new RegExp(word, "i");
  } catch {
    return new RegExp(escaped(word), "i");
  }
}

export function escaped(text: string): string {
  return text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&").replace(/\s/g, "\\s");
}

/** 1 for each kind that is found; null where nothing is searched for. */
export function search(data: Dataset, query: string): Uint8Array | null {
  const words = query.trim().split(/\s+/).filter(Boolean);
  if (words.length === 0) return null;
  const each = words.map((word) => matches(data, expression(word)));
  const ofGroups = each[0].map((_, group) => Number(each.every((found) => found[group])));
  const found = new Uint8Array(data.group.length);
  for (let kind = 0; kind < found.length; kind++) found[kind] = ofGroups[data.group[kind]];
  return found;
}

/** 1 for each group of kinds with such a text. */
function matches(data: Dataset, wanted: RegExp): Uint8Array {
  const found = new Uint8Array(data.facts.groups);
  for (const name of data.words.texts) {
    const texts = data.textOfGroups(name);
    const known = new Map<number, boolean>();
    for (let group = 0; group < found.length; group++) {
      const text = texts[group];
      if (text === 0 || found[group]) continue;
      let is = known.get(text);
      if (is === undefined) {
        is = wanted.test(`${name}:${data.words.strings[text]}`);
        known.set(text, is);
      }
      if (is) found[group] = 1;
    }
  }
  return found;
}
