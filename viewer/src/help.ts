// What the keys do.

import { h } from "./dom";

const KEYS: [string, string][] = [
  ["W S", "zoom in and out at the cursor; so does the wheel at the mouse"],
  ["A D", "move left and right; so does dragging"],
  ["\u2190 \u2192", "the cursor to the event before and after"],
  ["P", "to the peak"],
  ["[ ]", "to the step before and after"],
  ["F", "see all; so does a double click"],
  ["R", "begin a range at the cursor, or end it"],
  ["/", "search; the old search is replaced"],
  ["Esc", "end the search, unpin the bar"],
  ["Backspace", "take back the last change of what is shown"],
  ["Shift and drag", "look into a box"],
  ["click", "put the cursor there, and pin the bar"],
  ["?", "this list"],
];

export function HELP(close: () => void): HTMLElement {
  const rows = KEYS.map(([key, what]) =>
    h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, what)),
  );
  return h(
    "div",
    {},
    h("h2", {}, "Keys"),
    h("table", {}, h("tbody", {}, ...rows)),
    h(
      "p",
      {},
      "A search has words and regular expressions; a bar has to pass each. ",
      "Examples: op:mm, line:train.py:12, ^module:h.0$. ",
      "The address of this page holds what is shown: a copy of it shows the same.",
    ),
    h("button", { click: close }, "close"),
  );
}
