// The bar that was clicked, and the largest ones at the cursor: a table behind the picture.

import * as actions from "../actions";
import type { App } from "../app";
import * as books from "../books";
import { details } from "../details";
import { fill, h } from "../dom";
import type { Bar } from "../engine";
import { countText } from "../format";

const MOST = 50;

export async function showMap(app: App, asked: number): Promise<void> {
  const rows = await app.channel.ask("rows", { ...app.look, most: MOST });
  if (asked !== app.asked) return;
  const { bar } = app;
  const columns: [string, (row: Bar) => string][] = [
    ["category", ({ texts }) => texts.category],
    ["tensor", ({ texts }) => [texts.name, texts.shape].filter(Boolean).join(" ")],
    ["module", ({ texts }) => texts.module],
    ["op", ({ texts }) => texts.op],
    ["line", ({ texts }) => texts.line],
  ];
  const known = columns.filter(([, text]) => rows.some(text));
  const list = rows.map((row) => [
    h("button", { click: () => actions.pin(app, row.allocation) }, countText(row.row)),
    books.size(row.bytes),
    ...known.map(([, text]) => text(row)),
  ]);
  const heads = ["number", "bytes", ...known.map(([head]) => head)];
  const largest = books.table("The largest bars at the cursor", heads, list);
  fill(
    app.frame.panel,
    bar ? details(bar, app.doc.source, (like) => actions.searchAlike(app, like)) : null,
    bar
      ? h("button", { click: () => actions.unpin(app) }, "unpin")
      : h("p", {}, "Click a bar to pin it."),
    list.length ? largest : app.frame.noBars(),
  );
}
