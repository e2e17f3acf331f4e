// What a person does: where the cursor goes, what is seen, searched for and pinned.

import type { App } from "./app";
import { sideText } from "./comparison";
import type { Finding } from "./document";
import type { Bar } from "./engine";
import { exactly } from "./folded";
import { isDark } from "./frame";
import type { Only } from "./tree";

export function stepOf(app: App, change: number): number {
  return app.places[app.state.set].steps.findIndex(([, last]) => change <= last);
}

export function toSet(app: App, set: number): void {
  app.history.keep(app.state);
  app.state = { ...app.state, set };
  app.drawing = null;
  app.openSet(false).then(() => app.remember());
}

export function toPeak(app: App): void {
  goTo(app, app.facts.peak_change, app.peak.x);
}

/** Moves the cursor there, and what is seen if it is not seen. */
export function goTo(app: App, change: number, x: number): void {
  const { from, to } = app.state;
  const half = (to - from) / 2;
  const seen = from <= x && x <= to;
  app.change({ cursor: change, ...(seen ? {} : { from: x - half, to: x + half }) });
}

export async function toStep(app: App, step: number): Promise<void> {
  const { set, axis } = app.state;
  const row = app.facts.steps[step];
  if (!row) return;
  const range = app.places[set].steps[step];
  const [from, to] = axis === "time" ? [row.start_ns, row.end_ns] : range;
  app.change({ cursor: await stepPeak(app, set, step), from, to });
}

export function nextStep(app: App, by: number): void {
  const now = stepOf(app, app.state.cursor);
  const last = app.facts.steps.length - 1;
  toStep(app, Math.max(0, Math.min(last, now < 0 ? last : now + by)));
}

const stepPeaks = new Map<string, number>();

export async function stepPeak(app: App, set: number, step: number): Promise<number> {
  const key = `${set} ${step}`;
  const known = stepPeaks.get(key);
  if (known !== undefined) return known;
  const [from, to] = app.places[set].steps[step];
  const found = await app.channel.ask("peak", { set, axis: "events", from, to });
  stepPeaks.set(key, found.change);
  return found.change;
}

export async function compareSteps(app: App, before: number, after: number): Promise<void> {
  const { set } = app.state;
  const [one, other] = [await stepPeak(app, set, before), await stepPeak(app, set, after)];
  const [a, b] = [one, other].map((change) => sideText({ set, change }));
  const byTime = app.state.axis === "time";
  const { steps } = app.facts;
  const ranges = app.places[set].steps;
  const from = byTime ? steps[before].start_ns : ranges[before][0];
  const to = byTime ? steps[after].end_ns : ranges[after][1];
  const seen = { from, to, low: 0, high: 0, cursor: other };
  app.change({ ...seen, tab: "compare", before: a, after: b });
}

export function fit(app: App): void {
  const [from, to] = app.bounds;
  app.change({ from, to, low: 0, high: 0 });
}

export function zoom(app: App, factor: number, around: number, keep = true): void {
  const { from, to } = app.state;
  const at = from + (to - from) * around;
  app.change({ from: at - (at - from) * factor, to: at + (to - at) * factor }, keep);
}

export function pan(app: App, share: number, keep = true): void {
  const by = (app.state.to - app.state.from) * share;
  app.change({ from: app.state.from + by, to: app.state.to + by }, keep);
}

/** Where the cursor is in the pictures; the middle where it is not seen. */
export function cursorShare(app: App): number {
  const { from, to } = app.state;
  const share = (app.cursor.x - from) / (to - from);
  return share >= 0 && share <= 1 ? share : 0.5;
}

export async function stepCursor(app: App, by: number): Promise<void> {
  const { set, axis } = app.state;
  const at = await app.channel.ask("moment", { set, axis, change: app.state.cursor + by });
  goTo(app, at.change, at.x);
}

export function toggleRange(app: App): void {
  const { begin, cursor, measure } = app.state;
  const open = begin === null;
  const now = open ? (measure === "held" ? "grew" : measure) : "held";
  app.change({ begin: open ? cursor : null, measure: now });
  app.frame.controlsAnew();
}

export function toggleCategory(app: App, name: string): void {
  const { hidden } = app.state;
  const without = hidden.filter((each) => each !== name);
  app.change({ hidden: without.length < hidden.length ? without : [...hidden, name] });
}

export function toggleTheme(app: App): void {
  app.change({ theme: isDark() ? "light" : "dark" });
}

export function endSearch(app: App): void {
  app.frame.input.value = "";
  app.change({ search: "" });
}

/** Shows who is found; the view stays if it shows that. */
export function searchFor(app: App, search: string, keep = true): void {
  const shows = ["modules", "lines", "map"].includes(app.state.tab) || !search;
  app.change({ search, ...(shows ? {} : { tab: "modules" }) }, keep);
}

function searchWhere(app: App, line: string, module: string): void {
  const search = line ? exactly("line", line) : module && exactly("module", module);
  app.change({ search, tab: line ? "lines" : "modules" });
}

/** Exactly the finding's allocations, at the moment at which they are its bytes. */
export async function showFinding(app: App, finding: Finding, number: number): Promise<void> {
  if (finding.at === null) {
    searchWhere(app, finding.line, finding.module);
    return;
  }
  const { set, axis } = app.state;
  const at = await app.channel.ask("moment", { set, axis, change: finding.at });
  const only: Only = `finding ${number}`;
  const [from, to] = app.bounds;
  const seen = app.state.from <= at.x && at.x <= app.state.to && finding.kind !== "growth";
  const window = seen ? {} : { from, to, low: 0, high: 0 };
  app.change({
    ...window,
    ...{ only, cursor: at.change, begin: null, measure: "held", search: "", tab: "modules" },
  });
  app.frame.controlsAnew();
}

export function searchAlike(app: App, bar: Bar): void {
  const keys = ["category", "module", "op", "line", "shape"];
  const words = keys.map((key) => bar.texts[key] && exactly(key, bar.texts[key]));
  searchFor(app, words.filter(Boolean).join(" "));
}

export async function pin(app: App, allocation: number, keep = true): Promise<void> {
  const { set } = app.state;
  app.bar = await app.channel.ask("bar", { set, allocation });
  if (keep) app.change({ pinned: allocation, tab: "map" });
}

export function unpin(app: App): void {
  app.bar = null;
  app.change({ pinned: null });
}
