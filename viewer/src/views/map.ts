// The bar that was clicked, and the largest ones at the cursor: a table behind the picture.

import * as actions from "../actions";
import type { App } from "../app";
import * as books from "../books";
import { details } from "../details";
import { fill, h } from "../dom";
import { countText } from "../format";

const MOST = 50;

export async function showMap(app: App, asked: number): Promise<void> {
  const rows = await app.channel.ask("rows", { ...app.look, most: MOST });
  if (asked !== app.asked) return;
  const { bar } = app;
  const list = rows.map(({ allocation, row, bytes, texts }) => [
    h("button", { click: () => actions.pin(app, allocation) }, countText(row)),
    books.size(bytes),
    [texts.category, texts.name, texts.shape].filter(Boolean).join(" "),
    [texts.module, texts.op, texts.line].filter(Boolean).join(", "),
  ]);
  const heads = ["number", "bytes", "what it is", "module, op and line"];
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
