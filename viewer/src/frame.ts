// What is around the pictures: the head, the views' names, the search, the controls, the legend.

import * as actions from "./actions";
import type { App } from "./app";
import * as books from "./books";
import { COLOR_BY, type ColorBy } from "./colors";
import { copyLink, copyPicture, copyText } from "./copying";
import type { Axis } from "./dataset";
import { type Child, choice, explained, fill, h, prose, swatch } from "./dom";
import type { Layout, MomentFacts } from "./engine";
import { sizeText, timeText } from "./format";
import { HELP } from "./help";
import { isFarAbove, mostUsed } from "./opening";
import { LAYOUTS, type Room, type Tab, VIEWS } from "./state";
import type { Only } from "./tree";
import { showBooks } from "./views/books";
import { CompareView } from "./views/compare";
import { FirstLook } from "./views/first";
import { showMap } from "./views/map";
import { showRanks } from "./views/ranks";
import { showSteps } from "./views/steps";
import { showTimeline } from "./views/timeline";
import { matchedText, WhoView } from "./views/who";

const APART_MS = 1000; // between two changes that are taken back one by one

export const ONLY_WORDS: Record<string, string> = {
  all: "everything",
  peak: "alive at the peak",
  saved: "activations",
  end: "alive at the end",
  grew: "made in the range and kept",
};

/** The views: what each is called, and what one sees there. */
const SEEN: Record<Tab, [name: string, says: string]> = {
  ranks: ["Ranks", "The figures of all ranks, from the lowest to the highest, and who has that."],
  books: [
    "What to change",
    "Changes that lower the peak, what each saves, and code to paste. Below: the whole account.",
  ],
  timeline: [
    "Timeline",
    "How much memory is in use from moment to moment, by category. Click to look at another moment.",
  ],
  map: [
    "Address map",
    "Each allocation as a bar: how long it lives, and where in memory it lies. Click one to read about it.",
  ],
  modules: [
    "Modules",
    "Which parts of the model hold the memory. Layers that are alike share a row.",
  ],
  lines: ["Lines", "Which lines of the program made what is in use."],
  steps: ["Steps", "Each training step: its highest memory, and what it left behind."],
  compare: ["Compare", "What is larger or smaller at one moment than at another."],
};

const COLORED = new Set<Tab>(["timeline", "map"]);
const AT_CURSOR = new Set<Tab>(["timeline", "map", "modules", "lines"]);

export class Frame {
  readonly input = h("input", {
    type: "search",
    id: "search",
    placeholder: "module:h.0 op:mm line:train.py",
    "aria-label": "Search: words of a module, op, line or category",
    "aria-describedby": "matched",
    input: () => {
      const now = performance.now();
      actions.searchFor(this.app, this.input.value, now - this.typed > APART_MS);
      this.typed = now;
    },
  });
  readonly help = h("dialog", { class: "help", "aria-label": "Keys" });
  readonly tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Views" });
  readonly panel = h("div", { class: "panel", role: "tabpanel", id: "panel", tabindex: 0 });
  readonly who: WhoView;
  readonly compare: CompareView;
  private readonly matched = h("p", { class: "matched", id: "matched", "aria-live": "polite" });
  private readonly first: FirstLook;
  private readonly says = h("p", { class: "says" });
  private readonly controls = h("div", { class: "controls" });
  private readonly legend = h("div", { class: "legend" });
  private readonly status = h("p", { class: "status", role: "status", "aria-live": "polite" });
  private readonly told = h("p", { class: "told", role: "status", "aria-live": "polite" });
  private readonly notes = h("div", { class: "notes" });
  private readonly tip = h("div", { class: "tip", "aria-hidden": "true" });
  private typed = 0; // when something was last typed into the search
  private telling = 0;

  constructor(
    private readonly app: App,
    private readonly root: HTMLElement,
  ) {
    this.who = new WhoView(app);
    this.compare = new CompareView(app);
    this.first = new FirstLook(app);
  }

  build(): void {
    const { strip, bands, area, map } = this.app.charts;
    const charts = h("section", { class: "charts", "aria-label": "Pictures" });
    charts.append(strip.canvas, bands.canvas, area.canvas, map.canvas);
    charts.append(this.moves(), this.legend, this.notes);
    const side = h("section", { class: "side", "aria-label": "Numbers" }, this.panel);
    this.help.append(HELP(() => this.help.close()));
    const views = h("section", { class: "views", "aria-label": "Everything else" });
    views.append(this.tabs, this.says, this.controls, this.matched, this.status);
    views.append(h("div", { class: "columns" }, charts, side));
    // What is chosen above is shown below, on a phone out of sight.
    this.first.element.addEventListener("click", (event) => {
      const button = (event.target as HTMLElement).closest("button");
      if (button && !button.matches(".toggle")) views.scrollIntoView({ block: "nearest" });
    });
    fill(this.root, this.tools(), this.first.element, views, this.told, this.tip, this.help);
    const shown = VIEWS.filter((tab) => tab !== "ranks" || this.app.doc.job);
    fill(this.tabs, ...shown.map((tab) => this.tabOf(tab)));
    // On a link that somebody kept for a job, another page has no such view.
    if (!shown.includes(this.app.state.tab)) this.app.state.tab = this.app.usual.tab;
  }

  private tabOf(tab: Tab): HTMLElement {
    const click = () => this.app.change({ tab });
    return h(
      "button",
      { role: "tab", id: `tab-${tab}`, "aria-controls": "panel", "data-tab": tab, click },
      SEEN[tab][0],
    );
  }

  /** What is done with the page as a whole. */
  private tools(): HTMLElement {
    const { app } = this;
    const tell = (text: string) => this.tell(text);
    return h(
      "div",
      { class: "tools" },
      h("button", { click: () => copyLink(tell), title: "It opens what you see now" }, "Copy link"),
      h("button", { click: () => copyText(app, tell) }, "Copy as text"),
      h("button", { click: () => copyPicture(app, tell) }, "Copy as picture"),
      h("button", { click: () => actions.toggleTheme(app) }, "Light or dark"),
      h("button", { click: () => this.help.showModal() }, "Keys and search"),
    );
  }

  /** For fingers, and for whom the wheel is there to scroll. */
  private moves(): HTMLElement {
    const { app } = this;
    const move = (name: string, text: string, click: () => void) =>
      h("button", { "aria-label": name, title: name, click }, text);
    return h(
      "div",
      { class: "moves", role: "group", "aria-label": "Move the pictures" },
      move("Zoom in", "+", () => actions.zoom(app, 0.6, actions.cursorShare(app))),
      move("Zoom out", "\u2212", () => actions.zoom(app, 1 / 0.6, actions.cursorShare(app))),
      move("Earlier", "\u25c2", () => actions.pan(app, -0.3)),
      move("Later", "\u25b8", () => actions.pan(app, 0.3)),
      h("button", { click: () => actions.fit(app) }, "Whole trace"),
      h("span", { class: "hint" }, "Pinch, or Ctrl and wheel, to zoom; drag to move."),
    );
  }

  async opened(): Promise<void> {
    fill(this.notes, ...books.notes(this.app.facts).map((note) => h("p", {}, note)));
    this.controlsAnew();
    await this.first.show();
  }

  controlsAnew(): void {
    this.input.value = this.app.state.search;
    this.buildControls();
  }

  private buildControls(): void {
    const { app, input } = this;
    const { tab } = app.state;
    const isTyping = document.activeElement === input;
    const search = h("label", { class: "choice grow", for: "search" }, "search ", input);
    fill(this.controls, this.traces(), ...this.ofView(), search, ...this.moments());
    if (isTyping) input.focus();
    this.controls.dataset.tab = tab;
  }

  /** To other moments, where the view tells of one. */
  private moments(): HTMLElement[] {
    const { app } = this;
    if (!AT_CURSOR.has(app.state.tab)) return [];
    const title = "A range begins at the cursor; move the cursor, and tables show what changed";
    const text = app.state.begin === null ? "Begin a range" : "End the range";
    return [
      h("button", { click: () => actions.toPeak(app) }, "To the peak"),
      h("button", { click: () => actions.toggleRange(app), title }, text),
    ];
  }

  private traces(): HTMLElement | null {
    const { doc, state } = this.app;
    if (doc.sets.length < 2) return null;
    const sets = doc.sets.map((set, i): [string, string] => [
      String(i),
      `${set.name}, ${set.device}`,
    ]);
    const name = doc.job ? "rank" : "trace";
    return choice(name, sets, String(state.set), (set) => actions.toSet(this.app, Number(set)));
  }

  /** The controls that matter in this view. */
  private ofView(): HTMLElement[] {
    const { app } = this;
    const { axis, color, layout, tab } = app.state;
    const found: HTMLElement[] = [];
    if (COLORED.has(tab)) {
      const clocks: [string, string][] = [
        ["time", "the clock"],
        ["events", "events"],
      ];
      found.push(choice("go by", clocks, axis, (value) => app.setAxis(value as Axis)));
    }
    if (tab === "map") {
      const words = (names: readonly string[]) => names.map((n): [string, string] => [n, n]);
      const arrange = (value: string) => app.change({ layout: value as Layout, low: 0, high: 0 });
      const paint = (value: string) => app.change({ color: value as ColorBy });
      found.push(choice("arrange by", words(LAYOUTS), layout, arrange));
      found.push(choice("colour by", words(COLOR_BY), color, paint));
    }
    if (AT_CURSOR.has(tab) && tab !== "timeline") {
      const show = (value: string) => app.change({ only: value as Only });
      found.push(choice("show", this.only(), app.state.only, show));
    }
    return found;
  }

  private only(): [string, string][] {
    const found = Object.entries(ONLY_WORDS) as [string, string][];
    (this.app.facts.findings ?? []).forEach((row, i) => {
      if (row.at !== null) found.push([`finding ${i}`, `of the finding: ${row.kind} ${i + 1}`]);
    });
    return found;
  }

  /** What each colour means. A click hides a category, or searches for a module, op or line. */
  showLegend(): void {
    const { app } = this;
    const { drawing, state, facts } = app;
    const by = state.tab === "map" ? state.color : "category";
    const entries = (by === state.color ? drawing?.legend : app.categories()) ?? [];
    const items: Child[] = entries.map(({ name, color, word }) => {
      if (by === "category") return this.toggle(name, color);
      if (!word) return h("span", {}, swatch(color), name);
      const click = () => app.change({ search: word });
      return h("button", { class: "toggle", click, title: "Search for it" }, swatch(color), name);
    });
    const toRoom = (text: string, next: Room) =>
      h("button", { click: () => app.change({ room: next }) }, text);
    const used = sizeText(mostUsed(facts));
    const above = state.room === "categories" && [
      h("span", {}, `NVML: up to ${used} of the device in use, above the picture `),
      toRoom("make room for it", "device"),
    ];
    const rest = above || [toRoom("less room for the device", "categories")];
    if (isFarAbove(facts) && state.tab === "timeline") items.push(...rest);
    fill(this.legend, h("b", {}, `${by}: `), ...items);
  }

  /** A category's colour and name; a click hides it in the pictures, or shows it again. */
  toggle(name: string, color: string): HTMLElement {
    const { app } = this;
    const shown = !app.state.hidden.includes(name);
    return h(
      "button",
      {
        "aria-pressed": String(shown),
        class: "toggle",
        click: () => actions.toggleCategory(app, name),
        ...explained(app.doc, name),
      },
      swatch(color),
      name,
    );
  }

  where(): string {
    const { facts, cursor } = this.app;
    const at = cursor.change === facts.peak_change ? "At the peak" : "At the cursor";
    const step = actions.stepOf(this.app, cursor.change);
    const name = step < 0 ? "" : `, step ${facts.first_step + facts.steps[step].step}`;
    return `${at}${name}: ${timeText(cursor.time_ns)} after the start, on ${facts.device}`;
  }

  show(begin: MomentFacts | null): void {
    const { app } = this;
    const { cursor, state } = app;
    const parts = [`${this.where()}: ${sizeText(cursor.bytes)}`];
    if (begin) {
      const change = cursor.bytes - begin.bytes;
      const took = timeText(Math.abs(cursor.time_ns - begin.time_ns));
      parts.push(`range of ${took}, ${change >= 0 ? "+" : ""}${sizeText(change)}`);
    }
    this.status.textContent = parts.join("; ");
    this.status.dataset.bytes = String(cursor.bytes);
    this.status.dataset.change = String(cursor.change);
    this.first.mark();
    if (this.controls.dataset.tab !== state.tab) this.buildControls();
    if (document.activeElement !== this.input) this.input.value = state.search;
    this.showMatched();
  }

  /** What each word of the search finds, in any view. */
  private async showMatched(): Promise<void> {
    const { app } = this;
    const { search } = app.state;
    const matched = search ? await app.channel.ask("matched", app.look) : [];
    if (search === app.state.search) fill(this.matched, ...matchedText(matched));
  }

  showTabs(): void {
    const { tab } = this.app.state;
    for (const each of this.tabs.querySelectorAll<HTMLElement>("[role=tab]")) {
      const chosen = each.dataset.tab === tab;
      each.setAttribute("aria-selected", String(chosen));
      each.tabIndex = chosen ? 0 : -1;
    }
    this.panel.setAttribute("aria-labelledby", `tab-${tab}`);
    this.says.textContent = SEEN[tab][1];
    this.root.dataset.view = tab;
  }

  async showPanel(asked: number): Promise<void> {
    const { app, panel } = this;
    const { tab } = app.state;
    if (tab === "modules" || tab === "lines") await this.who.show(asked);
    else if (tab === "map") await showMap(app, asked);
    else if (tab === "compare") await this.compare.show(asked);
    else if (tab === "steps") showSteps(app);
    else if (tab === "books") showBooks(app);
    else if (tab === "ranks") showRanks(app);
    else showTimeline(app);
    panel.dataset.tab = tab;
    panel.dataset.asked = String(asked);
  }

  noBars(): HTMLElement {
    const { app } = this;
    const { search, only } = app.state;
    const among = only === "all" ? "" : ` of "${ONLY_WORDS[only] ?? only}"`;
    if (!search) return h("p", {}, `No bar${among} is alive at the cursor.`);
    return h(
      "p",
      {},
      `No bar${among} at the cursor matches the search. Esc ends the search. `,
      h("button", { click: () => actions.endSearch(app) }, "end the search"),
    );
  }

  /** What has just been done, for a few seconds. */
  tell(text: string): void {
    fill(this.told, prose(text));
    window.clearTimeout(this.telling);
    this.telling = window.setTimeout(() => fill(this.told), 4000);
  }

  showTip(text: string, event: { clientX: number; clientY: number } | null): void {
    this.tip.textContent = text;
    this.tip.hidden = !text;
    if (!event || !text) return;
    const width = Math.min(360, window.innerWidth - 16);
    const left = Math.max(8, Math.min(event.clientX + 14, window.innerWidth - width));
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${Math.min(event.clientY + 16, window.innerHeight - 60)}px`;
  }
}

export function isDark(): boolean {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) return chosen === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}
