// One allocation in words.

import { h } from "./dom";
import type { Bar } from "./engine";
import { countText, exactText, sizeText, timeText } from "./format";

type Source = Record<string, [number, string[]]>;

const joined = (parts: (string | undefined | false)[], between: string) =>
  parts.filter(Boolean).join(between);

/** What it is, who asked for it, and when and where it was made and freed: a line for each. */
export function inShort(bar: Bar): string {
  const t = bar.texts;
  const tensor = joined([t.name, t.shape, t.dtype], " ");
  const made = bar.start_ns === null ? "before the trace" : timeText(bar.start_ns);
  const freed = bar.end_ns === null ? "alive at the end" : `freed ${timeText(bar.end_ns)}`;
  const by = bar.end_ns === null ? "" : joined([t.freed_op, t.freed_module], " in ");
  return joined(
    [
      joined([sizeText(bar.bytes), t.category, tensor], "  \u00b7  "),
      joined([t.module, t.op, t.line], "  \u00b7  "),
      joined([`made ${made}`, t.phase], ", "),
      joined([freed, bar.end_ns !== null && t.free_phase, by && `by ${by}`], ", "),
    ],
    "\n",
  );
}

export function details(bar: Bar, source: Source, alike: (query: Bar) => void): HTMLElement {
  const t = bar.texts;
  const made = [
    t.made_op,
    t.made_module && `in ${t.made_module}`,
    t.made_line && `at ${t.made_line}`,
  ];
  const cause = [t.op, t.module && `in ${t.module}`, t.line && `at ${t.line}`];
  const freed = [t.freed_op, t.freed_module && `in ${t.freed_module}`];
  const words = (parts: (string | undefined)[]) => parts.filter(Boolean).join(" ");
  const begin =
    bar.start_ns === null ? "before the trace" : `${timeText(bar.start_ns)}, ${t.phase}`;
  const end = bar.end_ns === null ? "alive at the end" : `${timeText(bar.end_ns)}, ${t.free_phase}`;
  const took = bar.end_ns !== null && bar.start_ns !== null ? bar.end_ns - bar.start_ns : null;
  const rows: [string, string][] = [
    ["size", `${sizeText(bar.bytes)} (${exactText(bar.bytes)})`],
    ["block", bar.block < 0 ? "" : bar.block === bar.bytes ? "" : exactText(bar.block)],
    ["category", [t.category, t.role].filter(Boolean).join(", ")],
    ["tensor", [t.name, t.shape, t.dtype].filter(Boolean).join(" ")],
    ["made", words(made)],
    ["its forward", words(cause) === words(made) ? "" : words(cause)],
    ["from", begin],
    ["until", end],
    [t.free_phase === "backward" ? "its backward" : "freed by", words(freed)],
    ["lived", took === null ? "" : timeText(took)],
    ["address", bar.address],
    ["where", t.place],
    ["thread", t.thread],
    ["at the peak", bar.atPeak ? "yes" : "no"],
    ["number", `${countText(bar.row)} in t.allocations()`],
  ];
  const list = h("dl", { class: "details" });
  for (const [name, text] of rows) if (text) list.append(h("dt", {}, name), h("dd", {}, text));
  const text = `show all ${countText(bar.alike)} that are like it`;
  const others =
    bar.alike > 1
      ? h("button", { click: () => alike(bar) }, text)
      : h("p", {}, "No other is like it.");
  return h("div", {}, list, snippet(source[t.line] ?? source[t.made_line]), others);
}

function snippet(lines: [number, string[]] | undefined): HTMLElement | null {
  if (!lines) return null;
  const [first, texts] = lines;
  const text = texts.map((line, i) => `${String(first + i).padStart(5)}  ${line}`).join("\n");
  return h("pre", { class: "source" }, text);
}
