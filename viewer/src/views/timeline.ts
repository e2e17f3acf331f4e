// The sums at the cursor, by category: the same numbers as in Python's table.

import type { App } from "../app";
import * as books from "../books";
import { fill, h, term } from "../dom";
import { shareText } from "../format";

export function showTimeline(app: App): void {
  const { facts, doc, cursor } = app;
  const own = new Map(facts.categories.map((row) => [row.category, row]));
  const shown = doc.categories.filter((name) => own.get(name)?.allocations || name === "unknown");
  const rows = shown.map((name) => {
    const level = cursor.levels[doc.categories.indexOf(name)] ?? 0;
    const row = own.get(name);
    return [
      app.frame.toggle(name, doc.colors[name]),
      books.size(level),
      shareText(level, cursor.bytes),
      books.size(row?.at_peak ?? 0),
      books.size(row?.own_peak ?? 0),
    ];
  });
  const total = ["all", books.size(cursor.bytes), "", books.size(facts.peak.bytes), ""];
  const heads = [
    ...["category", "at the cursor", "share"],
    term(doc, "peak", "at the peak"),
    term(doc, "own_peak", "own peak"),
  ];
  const table = books.table(app.frame.where(), heads, rows, total);
  fill(app.frame.panel, h("div", { class: "sums" }, table));
}
