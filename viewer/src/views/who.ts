// Who holds how much: the model as a tree, or the lines of the program, as a picture and a table.

import * as actions from "../actions";
import type { App } from "../app";
import * as books from "../books";
import { saveTable } from "../copying";
import { choice, fill, h } from "../dom";
import type { Who } from "../engine";
import { countText, moreText, signed, sizeText } from "../format";
import { Icicle } from "../icicle";
import type { Matched } from "../search";
import { GROUPS } from "../state";
import { findingOf, type Measure, searchOf } from "../tree";
import { TreeTable } from "../treetable";
import { largest } from "./largest";

const MEASURES: Record<Measure, string> = {
  held: "held at the cursor",
  grew: "grew over the range",
  made: "made in the range",
  freed: "freed in the range",
  bytetime: "bytes \u00d7 seconds in the range",
};

/** The keys of a table in words: model tree → op → line. */
export const groupText = (keys: string) =>
  keys
    .split(",")
    .map((key) => (key === "model" ? "model tree" : key))
    .join(" \u2192 ");

export const groupChoices = () => GROUPS.map((keys): [string, string] => [keys, groupText(keys)]);

type Unit = (amount: number) => string;

export class WhoView {
  readonly icicle: Icicle;
  private readonly table = new TreeTable();

  constructor(private readonly app: App) {
    const tell = (text: string, event: MouseEvent | null) => app.frame.showTip(text, event);
    const choose = (search: string) => actions.searchFor(app, search);
    this.icicle = new Icicle("icicle", "Who holds it, as a picture", choose, tell);
  }

  async show(asked: number): Promise<void> {
    const { app } = this;
    const { keys, state } = app;
    const who = await app.channel.ask("who", { ...app.look, keys });
    if (asked !== app.asked) return;
    const { panel } = app.frame;
    const unit: Unit = state.measure === "bytetime" ? (n) => `${sizeText(n)}\u00b7s` : sizeText;
    const said = h("p", { class: "found", "data-bytes": who.bytes }, this.said(who, unit));
    const head = [this.controls(who), said, largest(app, "Largest", who.largest, unit)];
    const isOpen = panel.dataset.tab === "modules" || panel.dataset.tab === "lines";
    if (isOpen) fill(panel.firstElementChild ?? panel, ...head);
    else fill(panel, h("div", {}, ...head), this.icicle.pane.canvas, this.table.element);
    this.icicle.show(who.tree);
    this.table.show(who.tree, {
      caption: `${state.tab === "lines" ? "Lines" : "Modules"}: ${MEASURES[state.measure]}`,
      whole: state.measure === "held" ? app.facts.peak.bytes : who.allBytes,
      unit,
      compares: false,
      choose: (path) => actions.searchFor(app, searchOf(path)),
      ...rowsOf(app),
    });
  }

  private controls(who: Who): HTMLElement {
    const { app } = this;
    const { measure, keys, tab } = app.state;
    const measures = Object.entries(MEASURES) as [string, string][];
    const count = (value: string) => app.change({ measure: value as Measure });
    const group = (value: string) => app.change({ keys: value.split(",") });
    return h(
      "div",
      { class: "controls" },
      choice("count bytes", measures, measure, count),
      tab === "modules" ? choice("group by", groupChoices(), keys.join(","), group) : null,
      h("button", { click: () => saveTable(app, who) }, "save table"),
    );
  }

  private said(who: Who, unit: Unit): string {
    const { state, facts } = this.app;
    const { measure } = state;
    const all = amountText(measure, who.allBytes, who.allCount, unit);
    const rest = who.rest ? `; ${sizeText(who.rest)} of it in those that are not drawn` : "";
    const finding = facts.findings?.[findingOf(state.only)];
    if (finding && !state.search && measure === "held") {
      return `${all} at the cursor, ${books.provedText(finding, who.allBytes)}.`;
    }
    const whole = measure === "held" ? "the peak" : "the range";
    if (!state.search) return `${all}${rest}; shares are of ${whole}.`;
    return `Found ${amountText(measure, who.bytes, who.count, unit)}, of ${all}${rest}.`;
  }
}

/** Of a growth the number of allocations is a difference, too. */
function amountText(measure: Measure, bytes: number, count: number, unit: Unit): string {
  if (measure !== "grew") return `${unit(bytes)} in ${countText(count)} allocations`;
  return `${signed(bytes)} with ${count === 0 ? "as many allocations" : moreText(count)}`;
}

/** How the rows of a tree's table are sorted, and which are open. */
export function rowsOf(app: App) {
  const { sort, open } = app.state;
  const changed = (newSort: typeof sort, newOpen: string) => {
    app.history.keep(app.state);
    app.state = { ...app.state, sort: newSort, open: newOpen };
    app.remember();
  };
  return { sort, open, changed };
}

/** Which texts each word of the search has found. */
export function matchedText(matched: Matched[]): HTMLElement[] {
  return matched.map(({ word, texts, count }) => {
    const [, key = "", bare = word] = /^(\w+:)?(.*)$/.exec(word) ?? [];
    const more = count > texts.length ? ` and ${countText(count - texts.length)} more` : "";
    const hint = /[*^$=]/.test(bare)
      ? ""
      : ` Words are whole: ${key}*${bare}* looks inside of them.`;
    const said = count ? `${texts.join(", ")}${more}` : `nothing.${hint}`;
    return h("span", {}, h("b", {}, word), ` finds ${said} `);
  });
}
