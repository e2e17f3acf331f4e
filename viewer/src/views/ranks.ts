// A job: each rank with its peak, who differs and why, and what all of them show.

import * as actions from "../actions";
import type { App } from "../app";
import * as books from "../books";
import type { Job, Rank } from "../document";
import { fill, h, prose, swatch } from "../dom";
import { sizeText, timeText } from "../format";

export function showRanks(app: App): void {
  const { job } = app.doc;
  if (!job) return;
  fill(app.frame.panel, figures(job));
}

/** Each rank's peak as a bar by category; a click on a rank opens it. */
export function rankTable(app: App, job: Job): HTMLElement {
  const most = Math.max(...job.ranks.map((rank) => rank.peak), 1);
  const columns: [string, (rank: Rank) => HTMLElement | string][] = [
    ["rank", (rank) => nameOf(app, rank)],
    ["peak", (rank) => books.size(rank.peak)],
    ["by category", (rank) => bar(app, rank, most)],
    ["", (rank) => (rank.differs ? h("b", { class: "failed" }, "differs") : "")],
  ];
  // What is the same everywhere needs no column.
  const further: typeof columns = [
    ["in step", ({ step }) => (step === null ? "" : String(step))],
    ["ended", ({ status }) => status],
    ["on", ({ host, device }) => [host, device].filter(Boolean).join(" ")],
  ];
  for (const [head, text] of further) {
    if (new Set(job.ranks.map(text)).size > 1) columns.push([head, text]);
  }
  const rows = job.ranks.map((rank) => columns.map(([, cell]) => cell(rank)));
  const heads = columns.map(([head]) => head);
  return h("div", { class: "card ranks", "data-text": "" }, books.table("Ranks", heads, rows));
}

function nameOf(app: App, { rank, set, file }: Rank): HTMLElement {
  if (set === null) {
    return h("span", { title: `not on this page: pytracer report ${file}` }, `${rank} (not here)`);
  }
  const click = () => {
    app.state.tab = "timeline";
    actions.toSet(app, set);
  };
  return h("button", { click, "aria-label": `Open rank ${rank}` }, `rank ${rank}`);
}

function bar(app: App, { by_category }: Rank, most: number): HTMLElement {
  const parts = app.doc.categories
    .filter((name) => by_category[name] > 0)
    .map((name) => {
      const part = swatch(app.doc.colors[name]);
      part.className = "part";
      part.style.width = `${(100 * by_category[name]) / most}%`;
      part.title = `${name} ${sizeText(by_category[name])}`;
      return part;
    });
  return h("span", { class: "stack" }, ...parts);
}

function figures(job: Job): HTMLElement {
  const rows = job.spreads.map((row) => {
    const text = (amount: number) => (row.is_time ? timeText(amount) : books.size(amount));
    return [row.name, text(row.lowest), text(row.median), text(row.highest), row.ranks];
  });
  const heads = ["figure", "lowest", "median", "highest", "on rank"];
  return h("div", { class: "narrow" }, books.table("Figures of all ranks", heads, rows));
}

/** Who differs and why, who is missing, findings of all ranks. */
export function saidOfJob(job: Job): HTMLElement {
  const rows: HTMLElement[] = [];
  for (const [title, text] of job.said) {
    if (title) rows.push(h("li", {}, h("b", { class: "kind" }, title), " ", prose(text)));
    else rows[rows.length - 1]?.append(h("br"), prose(text)); // the row before goes on
  }
  const none = h("p", {}, "All ranks are alike, and none has a finding.");
  const list = rows.length ? h("ul", { class: "said" }, ...rows) : none;
  const head = h("h2", {}, "Who differs, and why");
  return h("div", { class: "card", "data-text": "" }, head, list);
}
