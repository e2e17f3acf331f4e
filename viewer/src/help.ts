// What the keys do.

import { h } from "./dom";

const KEYS: [string, string][] = [
  ["W S", "zoom in and out at the cursor; so do Ctrl and the wheel, and two fingers"],
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
      "A search has words, and a bar has to pass each: op:mm finds aten::mm, module:h.0 finds ",
      "transformer.h.0 and all within it, line:train.py:12 finds that line. Words are whole; ",
      "op:*mm* looks inside of them. op=aten::mm is the whole text, and ^op:aten::a. a regular ",
      "expression.",
    ),
    h("p", {}, "The address of this page holds what is shown: a copy of it shows the same."),
    h("p", {}, "Words with dots below them say what they mean when you point at them."),
    h("button", { click: close }, "close"),
  );
}
