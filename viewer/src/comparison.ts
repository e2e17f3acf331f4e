// The two moments of a comparison, and what is said of it.

import type { Document } from "./document";
import type { Comparison, Side } from "./engine";
import { moreText, signed } from "./format";

export const sideText = ({ set, change }: Side) => `${set}:${change}`;

/** Null where the page has no such moment. */
export function sideOf(text: string, doc: Document): Side | null {
  const [set, change] = text.split(":").map(Number);
  const facts = text ? doc.sets[set] : undefined;
  return facts && change >= -1 && change < facts.changes ? { set, change } : null;
}

/** What changed, and whether there are more blocks, larger ones, or larger inputs. */
export function changeText({ tree, counts, inputs }: Comparison): string {
  const [old, now] = counts;
  const size = tree.bytes > 0 ? "larger" : "smaller";
  const blocks = old === now ? `as many allocations, ${size} ones` : moreText(now - old);
  if (tree.bytes === 0 && tree.children.length === 0) return "Nothing changed.";
  const parts = [`Change ${signed(tree.bytes)}`, ...(tree.bytes ? [blocks] : [])];
  const times = inputs[0] > 0 ? inputs[1] / inputs[0] : 1;
  if (times > 1.01 || (times > 0 && times < 0.99)) {
    parts.push(`the inputs are ${times.toFixed(times < 10 ? 2 : 0)} times as large`);
  }
  return `${parts.join("; ")}.`;
}
