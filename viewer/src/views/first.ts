// The first ten seconds: how much and of what, who, and what to change. It tells of the peak.

import * as actions from "../actions";
import type { App } from "../app";
import * as books from "../books";
import type { Facts } from "../document";
import { explained, fill, h, prose, swatch } from "../dom";
import type { Who } from "../engine";
import { countText, exactText, shareText, sizeText, timeText } from "../format";
import { MODEL, type Node, nameless, searchOf } from "../tree";
import { largest } from "./largest";
import { rankTable, saidOfJob } from "./ranks";

const MOST_ROWS = 8; // of the model's tree
const FEW_ROWS = 5; // beside which there is room below
const MOST_CHANGES = 3;
const WORTH_OPENING = 0.08; // of the peak
const FULL_ENOUGH = 0.2; // of the card, to draw the categories against its size

export class FirstLook {
  readonly element = h("section", { class: "first", "aria-label": "In short" });
  private asked = 0;

  constructor(private readonly app: App) {}

  async show(): Promise<void> {
    const { app } = this;
    const asked = ++this.asked;
    const { set } = app.state;
    const who = await app.channel.ask("who", {
      ...{ set, axis: "events", layout: "address", color: "category", hidden: [], only: "all" },
      ...{ search: "", dark: false, keys: [MODEL] },
      moment: { measure: "held", at: app.facts.peak_change, from: -1 },
    });
    if (asked !== this.asked) return;
    const { job } = app.doc;
    const rows = opened(who.tree);
    const cards = job
      ? columns(rankTable(app, job), saidOfJob(job), changesCard(app), job.ranks.length)
      : columns(this.who(rows), changesCard(app), largestCard(app, who), rows.length);
    fill(
      this.element,
      h("p", { class: "sentence", "data-text": "" }, ...sentence(app, job?.head)),
      job ? null : h("div", {}, amountBar(app.facts, app)),
      this.legend(),
      h("div", { class: "cards" }, ...cards),
    );
  }

  /** Categories that are hidden in the pictures are struck through here, too. */
  mark(): void {
    for (const each of this.element.querySelectorAll<HTMLElement>(".toggle")) {
      const hidden = this.app.state.hidden.includes(each.dataset.category ?? "");
      each.setAttribute("aria-pressed", String(!hidden));
    }
  }

  private legend(): HTMLElement {
    const { app } = this;
    const items = present(app.facts).map(({ category, at_peak }) => {
      const click = () => actions.toggleCategory(app, category);
      const part = h("span", { class: "amount" }, ` ${sizeText(at_peak)} `);
      const share = h("span", { class: "soft" }, shareText(at_peak, app.facts.peak.bytes));
      const about = { ...explained(app.doc, category), "data-category": category };
      return h(
        "button",
        { class: "toggle", "aria-pressed": "true", click, title: exactText(at_peak), ...about },
        swatch(app.doc.colors[category]),
        `${category} `,
        part,
        share,
      );
    });
    const whose = app.doc.job && h("span", { class: "soft" }, `${app.facts.name} at its peak: `);
    return h("div", { class: "chips", "data-text": "" }, whose, ...items);
  }

  private who(opened: Row[]): HTMLElement {
    const { app } = this;
    const rows = opened.map(({ path, depth }) => {
      const node = path[path.length - 1];
      const name = node.name || nameless(node.key);
      const click = () => app.change({ search: searchOf(path), tab: "modules", only: "all" });
      const button = h("button", { class: "name", click, title: name }, h("bdi", {}, name));
      const head = h("th", { scope: "row" }, button);
      head.style.paddingLeft = `${depth * 1.1}em`;
      const share = h("td", { class: "share" }, shareText(node.bytes, app.facts.peak.bytes));
      share.style.setProperty("--part", `${(100 * node.bytes) / (app.facts.peak.bytes || 1)}%`);
      const size = h("td", { "data-bytes": node.bytes, title: exactText(node.bytes) });
      size.append(sizeText(node.bytes));
      return h("tr", { class: depth ? "inner" : "" }, head, size, share);
    });
    const all = h("button", { click: () => app.change({ tab: "modules" }) }, "All modules");
    const lines = h("button", { click: () => app.change({ tab: "lines" }) }, "All lines");
    const heads = ["module", "bytes", "share"].map((text) => h("th", { scope: "col" }, text));
    return h(
      "div",
      { class: "card holders", "data-text": "" },
      h("div", { class: "head" }, h("h2", {}, "Who holds it"), all, lines),
      h(
        "table",
        {},
        h("caption", { class: "hidden" }, "The model at the peak, largest first"),
        h("thead", { class: "hidden" }, h("tr", {}, ...heads)),
        h("tbody", {}, ...rows),
      ),
    );
  }
}

/** Two columns. The third card is in the left one if that has few rows, and else in the right. */
function columns(left: HTMLElement, right: HTMLElement, third: HTMLElement, rows: number) {
  const piles = [[left], [right]];
  piles[rows <= FEW_ROWS ? 0 : 1].push(third);
  return piles.map((pile) => h("div", { class: "pile" }, ...pile));
}

const largestCard = (app: App, who: Who) =>
  h("div", { class: "card", "data-text": "" }, largest(app, "Largest", who.largest, sizeText));

const present = (facts: Facts) => facts.categories.filter((row) => row.at_peak > 0);

/** How much, where and when; against the card where its size is known. */
function sentence(app: App, ofJob: string | undefined): (Element | string)[] {
  if (ofJob) return [h("b", {}, ofJob)];
  const { facts } = app;
  const { bytes, when, time_ns } = facts.peak;
  const said: (Element | string)[] = [
    app.isPair ? `At its peak ${facts.name} held ` : "At its peak it held ",
    h("b", {}, sizeText(bytes)),
    ` on ${facts.device}: ${when}, ${timeText(time_ns)} after the start.`,
  ];
  const failed = facts.failures[facts.failures.length - 1];
  if (failed) {
    said.push(" ", h("b", { class: "failed" }, `A request for ${sizeText(failed.bytes)} failed.`));
  }
  const others = app.isPair ? app.doc.sets.filter((set) => set.name !== facts.name) : [];
  for (const { name, peak } of others)
    said.push(` ${name} held `, h("b", {}, sizeText(peak.bytes)), ".");
  const { capacity } = facts;
  if (capacity && bytes > capacity) {
    const text = `More than the card's ${sizeText(capacity)}.`;
    said.push(" ", h("b", { class: "failed" }, text));
  } else if (capacity) {
    said.push(` That is ${shareText(bytes, capacity)} of the card's ${sizeText(capacity)}.`);
  }
  return said;
}

/** The categories against the card; where they would be a sliver, large, and the card below. */
function amountBar(facts: Facts, app: App): HTMLElement {
  const { capacity, peak } = facts;
  const isFull = capacity && peak.bytes >= FULL_ENOUGH * capacity;
  const against = isFull ? Math.max(capacity, peak.bytes) : peak.bytes;
  const parts = present(facts).map(({ category, at_peak }) => {
    const part = swatch(app.doc.colors[category]);
    part.className = "part";
    part.style.width = `${(100 * at_peak) / Math.max(against, 1)}%`;
    part.title = `${category}: ${exactText(at_peak)}`;
    return part;
  });
  const bars = [h("div", { class: "stack large" }, ...parts)];
  if (capacity && peak.bytes > capacity) {
    const end = h("div", { class: "card-end", title: "the card's size" });
    end.style.left = `${(100 * capacity) / peak.bytes}%`;
    bars.push(end);
  } else if (capacity && against !== capacity) {
    const used = h("span", { class: "part used" });
    used.style.width = `max(2px, ${(100 * peak.bytes) / capacity}%)`;
    bars.push(h("div", { class: "stack card-size", title: "the same against the card" }, used));
  }
  return h("div", { class: "amount-bar", "aria-hidden": "true" }, ...bars);
}

interface Row {
  path: Node[];
  depth: number;
}

/** The largest rows, with the largest of them opened while there is room. */
export function opened(tree: Node): Row[] {
  const top = tree.children.filter((node) => node.bytes > 0);
  let rows: Row[] = top.slice(0, MOST_ROWS - 3).map((node) => ({ path: [node], depth: 0 }));
  const done = new Set<Node>();
  for (;;) {
    const last = ({ path }: Row) => path[path.length - 1];
    const next = rows
      .filter((row) => !done.has(last(row)) && last(row).children.length > 1)
      .filter((row) => last(row).bytes >= WORTH_OPENING * tree.bytes)
      .sort((a, b) => last(b).bytes - last(a).bytes)[0];
    if (!next || rows.length >= MOST_ROWS) return rows;
    const node = last(next);
    done.add(node);
    const inner = node.children
      .filter((child) => child.bytes > 0)
      .slice(0, Math.max(MOST_ROWS - rows.length, 2))
      .map((child) => ({ path: [...next.path, child], depth: next.depth + 1 }));
    rows = rows.flatMap((row) => (row === next ? [row, ...inner] : [row]));
  }
}

/** The first changes of the list; what they save is in front. */
function changesCard(app: App): HTMLElement {
  const { facts } = app;
  const rows = facts.advice ?? [];
  const toAll = () => app.change({ tab: "books" });
  const text =
    rows.length > MOST_CHANGES ? `All ${countText(rows.length)} changes` : "More, with code";
  const parts = rows
    .slice(0, MOST_CHANGES)
    .map((row) =>
      h(
        "li",
        { "data-bytes": row.saves, title: row.said },
        h("b", { class: `kind ${row.kind}`, ...explained(app.doc, row.kind) }, row.kind),
        " ",
        ...books.saidText(row.said),
      ),
    );
  const title = app.doc.job ? `What to change on ${facts.name}` : "What to change";
  const note = (facts.notes ?? [])[0];
  const without = note ?? books.firstAdvice(facts)?.text ?? NO_CHANGE;
  return h(
    "div",
    { class: "card advice", "data-text": "" },
    h("div", { class: "head" }, h("h2", {}, title), h("button", { click: toAll }, text)),
    note && rows.length ? h("p", { class: "note" }, prose(note)) : null,
    rows.length ? h("ol", { class: "top" }, ...parts) : h("p", { class: "none" }, prose(without)),
  );
}

const NO_CHANGE = "No change is known that lowers the peak by a hundredth.";
