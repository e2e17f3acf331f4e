// The first line, module and op, because that is what people ask for; a click shows its bars.

import * as actions from "../actions";
import type { App } from "../app";
import { h } from "../dom";
import { exactly } from "../folded";
import { type Largest, OWN_LINE } from "../tree";

const KEYS: Record<string, string> = { [OWN_LINE]: "your own line" };

export function largest(
  app: App,
  title: string,
  rows: Largest[],
  unit: (amount: number) => string,
): HTMLElement {
  const parts: (Node | string)[] = rows.map((row, i) => {
    const own = row.name.replace(/ \(was \d+\)$/, "");
    const search = () =>
      actions.searchFor(app, exactly(row.key === OWN_LINE ? "line" : row.key, own));
    const name = h("button", { click: search }, row.name);
    const end = i < rows.length - 1 ? ",\u00a0" : "";
    return h(
      "span",
      {},
      `${i ? "" : `${title}: `}${KEYS[row.key] ?? row.key} `,
      name,
      ` ${unit(row.bytes)}${end}`,
    );
  });
  if (rows.length && rows[0].key !== "line") {
    parts.push(". Lines were not recorded: trace(stacks=True), or run --stacks");
  }
  return h("p", { class: "largest" }, ...parts);
}
