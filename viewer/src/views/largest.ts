// The first line, module and op, because that is what people ask for; a click shows its bars.

import * as actions from "../actions";
import type { App } from "../app";
import { h, prose } from "../dom";
import { exactText } from "../format";
import { asWritten, type Largest, OWN_LINE } from "../tree";

const KEYS: Record<string, string> = { [OWN_LINE]: "your own line" };

export function largest(
  app: App,
  title: string,
  rows: Largest[],
  unit: (amount: number) => string,
): HTMLElement {
  const parts = rows.flatMap(({ key, name, word, bytes }) => {
    const click = () => actions.searchFor(app, word);
    const button = h("button", { class: "name", click, title: name }, h("bdi", {}, name));
    const code = sourceOf(app, key, name);
    return [
      h("dt", {}, KEYS[key] ?? key),
      h("dd", {}, button, code && h("code", {}, code)),
      h("dd", { class: "amount", "data-bytes": bytes, title: exactText(bytes) }, unit(bytes)),
    ];
  });
  const lines = rows.some(({ key }) => key === "line");
  const without = "Lines were not recorded: `trace(stacks=True)`, or `run --stacks`.";
  if (rows.length === 0) return h("div", {});
  return h(
    "div",
    { class: "largest", role: "group", "aria-label": title },
    h("h3", {}, title),
    h("dl", {}, ...parts),
    !lines ? h("p", { class: "soft" }, prose(without)) : null,
  );
}

/** What is written there, where the page may have the source. */
function sourceOf(app: App, key: string, name: string): string {
  if (key !== "line" && key !== OWN_LINE) return "";
  const place = asWritten(name);
  const [first, lines] = app.doc.source[place] ?? [0, []];
  const number = Number(place.slice(place.lastIndexOf(":") + 1));
  return lines[number - first]?.trim() ?? "";
}
