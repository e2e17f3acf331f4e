// The page: its state, what the keys and the mouse do to it, and what is shown of it.

import * as books from "./books";
import type { Channel } from "./channel";
import { Charts, type View } from "./charts";
import { COLOR_BY, type ColorBy } from "./colors";
import type { Axis } from "./dataset";
import { details, inShort } from "./details";
import type { Document, Facts, Finding } from "./document";
import { choice, fill, h, prose, save, swatch } from "./dom";
import type {
  Bar,
  Comparison,
  Drawing,
  Layout,
  Look,
  MomentFacts,
  Places,
  Side,
  Strip,
  Who,
} from "./engine";
import { countText, exactText, shareText, signed, sizeText, timeText } from "./format";
import { HELP } from "./help";
import { Icicle } from "./icicle";
import { escaped } from "./search";
import { fromHash, History, LAYOUTS, type Room, type State, TABS, type Tab, toHash } from "./state";
import { findingOf, type Largest, type Measure, type Moment, type Only } from "./tree";
import { TreeTable } from "./treetable";

const GROUPS = [
  "module,op,line",
  "category,module,op",
  "op,line,module",
  "line,op",
  "category,role,name",
  "phase,module,op",
  "name,shape,dtype",
];
const MEASURE_WORDS: Record<Measure, string> = {
  held: "held at the cursor",
  grew: "grew over the range",
  made: "made in the range",
  freed: "freed in the range",
  bytetime: "bytes \u00d7 seconds in the range",
};
const ONLY_WORDS: Record<string, string> = {
  all: "everything",
  peak: "alive at the peak",
  saved: "saved for backward",
  end: "alive at the end",
  grew: "made in the range and kept",
};
const TAB_WORDS: Record<Tab, string> = {
  who: "Who",
  bar: "Bar",
  steps: "Steps",
  books: "What to change",
  compare: "Compare",
};

const WINDOW = ["from", "to", "low", "high"];
const APART_MS = 1000; // between two changes that are taken back one by one
const REST_MS = 120; // without a move, after which each bar is drawn

export class App {
  private state: State;
  private readonly usual: State;
  private readonly history = new History();
  private readonly charts: Charts;
  private drawing: Drawing | null = null;
  private strip: Strip | null = null;
  private cursor: MomentFacts;
  private peak: MomentFacts;
  private begin: MomentFacts | null = null;
  private bar: Bar | null = null;
  private hover: number | null = null;
  private rest = 0; // the timer until each bar is drawn
  private busy = false;
  private again = false;
  private soon = 0; // the timer until the address is written
  private wheeled = 0; // when the wheel last turned
  private asked = 0; // the latest question about who holds what
  private typed = 0; // when something was last typed into the search

  private readonly whoTable = new TreeTable();
  private readonly compareTable = new TreeTable();
  private readonly whoIcicle: Icicle;
  private readonly compareIcicle: Icicle;
  private readonly controls = h("div", { class: "controls" });
  private readonly legend = h("div", { class: "legend" });
  private readonly sums = h("div", { class: "sums" });
  private readonly panel = h("div", { class: "panel", role: "tabpanel", id: "panel", tabindex: 0 });
  private readonly tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Views" });
  private readonly status = h("p", { class: "status", role: "status", "aria-live": "polite" });
  private readonly advice = h("p", { class: "advice" });
  private readonly tip = h("div", { class: "tip", "aria-hidden": "true" });
  private readonly notes = h("div", { class: "notes" });
  private readonly help = h("dialog", { class: "help", "aria-label": "Keys" });
  private readonly input = h("input", {
    type: "search",
    id: "search",
    placeholder: "module:h.0 op:mm line:train",
    "aria-label": "Search: words and regular expressions",
    input: () => {
      const now = performance.now();
      this.change({ search: this.input.value }, now - this.typed > APART_MS);
      this.typed = now;
    },
  });

  constructor(
    private readonly doc: Document,
    private readonly channel: Channel,
    private readonly places: Places[],
    private readonly root: HTMLElement,
  ) {
    this.charts = new Charts(window.innerWidth < 600 ? 60 : 70);
    const choose = (path: string[]) => this.searchFor(path, this.state.keys);
    const tell = (text: string, event: MouseEvent | null) => this.showTip(text, event);
    this.whoIcicle = new Icicle("icicle", "Who holds it, as a picture", choose, tell);
    this.compareIcicle = new Icicle("icicle", "What changed, as a picture", choose, tell);
    this.usual = this.usualState();
    this.state = fromHash(location.hash, this.usual);
    if (!this.doc.sets[this.state.set]) this.state.set = 0;
    const nothing = { change: -1, x: 0, time_ns: 0, levels: [], bytes: 0 };
    this.cursor = this.peak = nothing;
  }

  async start(): Promise<void> {
    this.applyTheme();
    this.build();
    await this.openSet(location.hash.length > 1);
    this.listen();
  }

  get facts(): Facts {
    return this.doc.sets[this.state.set];
  }

  // -------------------------------------------------------------- state

  private usualState(): State {
    const facts = this.doc.sets[0];
    return {
      set: 0,
      ...opening(facts),
      low: 0,
      high: 0,
      cursor: facts.peak_change,
      begin: null,
      layout: "address",
      color: "category",
      only: "all",
      measure: "held",
      keys: GROUPS[0].split(","),
      hidden: [],
      search: "",
      pinned: null,
      tab: "who",
      before: "",
      after: "",
      sort: "bytes",
      open: "",
      theme: "system",
      room: "categories",
    };
  }

  private get bounds(): [number, number] {
    const { begin_ns, end_ns, changes } = this.facts;
    if (this.state.axis === "events") return [-1, Math.max(changes, 1)];
    return [begin_ns, Math.max(end_ns, begin_ns + 1)];
  }

  /** Every change of what is shown comes through here. Looking elsewhere changes no numbers. */
  private change(what: Partial<State>, keep = true): void {
    if (keep) this.history.keep(this.state);
    this.state = { ...this.state, ...what };
    this.keepInBounds();
    this.remember();
    if (what.theme) this.applyTheme();
    if (!Object.keys(what).every((name) => WINDOW.includes(name))) this.refresh();
    else {
      this.paint();
      this.draw();
    }
  }

  private keepInBounds(): void {
    const [first, last] = this.bounds;
    const { state } = this;
    const least = state.axis === "time" ? 100 : 4;
    let width = Math.min(Math.max(state.to - state.from, least), last - first);
    if (!(width > 0)) width = last - first;
    state.from = Math.min(Math.max(state.from, first), last - width);
    state.to = state.from + width;
    state.cursor = Math.max(-1, Math.min(this.facts.changes - 1, Math.round(state.cursor)));
  }

  /** Browsers refuse an address that changes with every move of the mouse. */
  private remember(): void {
    window.clearTimeout(this.soon);
    this.soon = window.setTimeout(() => {
      try {
        history.replaceState(null, "", `#${toHash(this.state, this.usual)}`);
      } catch {
        // A page inside a notebook has no address of its own.
      }
    }, 100);
  }

  private async undo(): Promise<void> {
    const before = this.history.back();
    if (!before) return;
    const { set, axis, theme } = this.state;
    this.state = before;
    this.remember();
    if (before.theme !== theme) this.applyTheme();
    if (before.set !== set || before.axis !== axis) await this.openSet(true);
    else await this.refresh();
    this.input.value = this.state.search;
    this.buildControls();
  }

  private async openSet(asItIs: boolean): Promise<void> {
    const { set } = this.state;
    if (!asItIs) {
      this.state = { ...this.usual, ...opening(this.facts), set, tab: this.state.tab };
      this.state.cursor = this.facts.peak_change;
    }
    const { axis } = this.state;
    const change = this.facts.peak_change;
    this.peak = await this.channel.ask("moment", { set, axis: this.state.axis, change });
    this.keepInBounds();
    await this.drawStrip();
    if (this.state.pinned !== null) await this.pin(this.state.pinned, false);
    else this.bar = null;
    this.input.value = this.state.search;
    fill(this.notes, ...books.notes(this.facts).map((note) => h("p", {}, note)));
    this.showAdvice();
    this.buildControls();
    this.legend.dataset.axis = axis;
    await this.refresh();
  }

  private async setAxis(axis: Axis): Promise<void> {
    const { set, from, to } = this.state;
    const old = this.state.axis;
    const [left, right] = await Promise.all(
      [from, to].map((x) => this.channel.ask("moment", { set, axis: old, x })),
    );
    const [begin, end] = await Promise.all(
      [left, right].map((at) => this.channel.ask("moment", { set, axis, change: at.change })),
    );
    const change = this.facts.peak_change;
    this.peak = await this.channel.ask("moment", { set, axis, change });
    this.change({ axis, from: begin.x, to: Math.max(end.x, begin.x + 1) });
    await this.drawStrip();
    this.paint();
  }

  // -------------------------------------------------------------- what is asked for

  private get moment(): Moment {
    const { measure, cursor, begin } = this.state;
    const other = begin ?? -1;
    const range = measure !== "held";
    return {
      measure,
      at: range ? Math.max(cursor, other) : cursor,
      from: range ? Math.min(cursor, other) : other,
    };
  }

  private get look(): Look {
    const { set, axis, layout, color, hidden, only, search } = this.state;
    return { set, axis, layout, color, hidden, only, search, dark: isDark(), moment: this.moment };
  }

  /** Draws again and asks again; of many calls in a row only the last one counts. */
  private async refresh(): Promise<void> {
    const { set, axis, cursor, begin } = this.state;
    const asked = ++this.asked;
    const drawn = this.draw();
    const [now, other] = await Promise.all([
      this.channel.ask("moment", { set, axis, change: cursor }),
      begin === null ? null : this.channel.ask("moment", { set, axis, change: begin }),
    ]);
    if (asked !== this.asked) return;
    this.cursor = now;
    this.begin = other;
    this.paint();
    this.showSums();
    this.showStatus();
    this.showTabs();
    await Promise.all([drawn, this.showPanel(asked)]);
  }

  /** Draws what is seen; coarse where each bar would take long, and each bar once it rests. */
  private async draw(): Promise<void> {
    window.clearTimeout(this.rest);
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    do {
      this.again = false;
      const began = performance.now();
      await this.drawOnce(true);
      performance.measure("draw", { start: began, end: performance.now() });
    } while (this.again);
    this.busy = false;
    if (this.drawing?.exact === false)
      this.rest = window.setTimeout(() => this.drawEach(), REST_MS);
  }

  private async drawEach(): Promise<void> {
    const began = performance.now();
    await this.drawOnce(false);
    performance.measure("drawEach", { start: began, end: performance.now() });
  }

  private async drawOnce(soon: boolean): Promise<void> {
    this.charts.measure();
    const { area, map } = this.charts;
    const { state } = this;
    const highest = this.drawing?.highest ?? this.highestAddress();
    const size = { width: map.pictureWidth, height: map.pictureHeight };
    const wide = { width: area.pictureWidth, height: area.pictureHeight };
    const drawing = await this.channel.ask("draw", {
      ...this.look,
      from: state.from,
      to: state.to,
      soon,
      area: { ...wide, least: leastTop(this.facts, state.room) },
      map: { ...size, low: state.high ? state.low : 0, high: state.high || highest },
    });
    if (!drawing) return; // another picture is wanted by now
    if (!state.high && drawing.highest !== highest) {
      this.drawing = drawing;
      this.again = true;
      return;
    }
    const seen: [number, number] = [state.from, state.to];
    const high = drawing.area.length / wide.width;
    area.put(drawing.area, wide.width, high, seen);
    map.put(drawing.map, size.width, size.height, seen);
    map.canvas.dataset.drawn = drawing.exact ? "each" : "coarse";
    this.drawing = drawing;
    // Where a bar is among others is known once they have been laid out.
    if (this.bar && this.bottomOf(this.bar) === null) await this.pin(this.bar.allocation, false);
    this.paint();
    this.showLegend();
  }

  private highestAddress(): number {
    const last = this.facts.regions[this.facts.regions.length - 1];
    return last ? last[1] + last[2] : 1;
  }

  private async drawStrip(): Promise<void> {
    this.charts.measure();
    const { strip } = this.charts;
    const { set, axis } = this.state;
    const [width, height] = [strip.pictureWidth, strip.pictureHeight];
    this.strip = await this.channel.ask("strip", { set, axis, width, height });
    strip.put(this.strip.area, width, height, this.bounds);
  }

  /** Only what lies on top of the pictures. */
  private paint(): void {
    this.charts.draw(this.view());
  }

  private view(): View {
    const { state, facts, bar } = this;
    const byTime = state.axis === "time";
    const left = bar && (byTime ? (bar.start_ns ?? facts.begin_ns) : bar.start);
    const right = bar && (byTime ? (bar.end_ns ?? facts.end_ns) : bar.end);
    const bottom = bar ? this.bottomOf(bar) : null;
    return {
      state,
      facts,
      places: this.places[state.set],
      document: this.doc,
      bounds: this.bounds,
      cursorX: this.cursor.x,
      beginX: this.begin?.x ?? null,
      hoverX: this.hover,
      peakX: this.peak.x,
      drawing: this.drawing,
      strip: this.strip,
      bar:
        bar && left !== null && right !== null && bottom !== null
          ? { left, right, low: bottom, high: bottom + bar.bytes }
          : null,
    };
  }

  private bottomOf(bar: Bar): number | null {
    return bar.bottoms[this.state.layout] ?? null;
  }

  // -------------------------------------------------------------- what is around the pictures

  private build(): void {
    const { strip, bands, area, map } = this.charts;
    const charts = h("section", { class: "charts", "aria-label": "Pictures" });
    charts.append(strip.canvas, bands.canvas, area.canvas, map.canvas, this.legend, this.notes);
    const side = h("section", { class: "side", "aria-label": "Numbers" }, this.sums, this.tabs);
    side.append(this.panel);
    this.help.append(HELP(() => this.help.close()));
    const columns = h("div", { class: "columns" }, charts, side);
    fill(this.root, this.controls, this.advice, this.status, columns);
    this.root.append(this.tip, this.help);
    const tabs = TABS.map((tab) =>
      h(
        "button",
        {
          role: "tab",
          id: `tab-${tab}`,
          "aria-controls": "panel",
          "data-tab": tab,
          click: () => this.change({ tab }),
        },
        TAB_WORDS[tab],
      ),
    );
    fill(this.tabs, ...tabs);
  }

  private buildControls(): void {
    const { state, doc } = this;
    const sets = doc.sets.map((set, i): [string, string] => [
      String(i),
      `${set.name}, ${set.device}`,
    ]);
    const words = (names: readonly string[]) => names.map((name): [string, string] => [name, name]);
    const only = Object.entries(ONLY_WORDS) as [string, string][];
    (this.facts.findings ?? []).forEach((row, i) => {
      if (row.at !== null) only.push([`finding ${i}`, `of the finding: ${row.kind} ${i + 1}`]);
    });
    fill(
      this.controls,
      sets.length > 1 && choice("trace", sets, String(state.set), (set) => this.toSet(Number(set))),
      choice("across", words(["time", "events"]), state.axis, (axis) => this.setAxis(axis as Axis)),
      choice("up", words(LAYOUTS), state.layout, (layout) =>
        this.change({ layout: layout as Layout, low: 0, high: 0 }),
      ),
      choice("colour", words(COLOR_BY), state.color, (color) =>
        this.change({ color: color as ColorBy }),
      ),
      choice("only", only, state.only, (value) => this.change({ only: value as Only })),
      h("label", { class: "choice grow", for: "search" }, "search ", this.input),
      h("button", { click: () => this.toPeak() }, "peak"),
      h("button", { click: () => this.fit() }, "all"),
      h(
        "button",
        { click: () => this.toggleRange() },
        state.begin === null ? "range" : "end range",
      ),
      h("button", { click: () => this.savePicture() }, "save picture"),
      h("button", { click: () => this.toggleTheme() }, "light or dark"),
      h("button", { click: () => this.help.showModal() }, "keys ?"),
    );
  }

  private showLegend(): void {
    const entries = this.drawing?.legend ?? [];
    const items: HTMLElement[] = entries.map((entry) =>
      h("span", {}, swatch(entry.color), entry.name),
    );
    const { room } = this.state;
    const toRoom = (text: string, next: Room) =>
      h("button", { click: () => this.change({ room: next }) }, text);
    const used = sizeText(mostUsed(this.facts));
    const above = room === "categories" && [
      h("span", {}, `NVML: up to ${used} of the device in use, above the picture `),
      toRoom("make room for it", "device"),
    ];
    const rest = above || [toRoom("less room for the device", "categories")];
    if (isFarAbove(this.facts)) items.push(...rest);
    fill(this.legend, h("b", {}, `${this.state.color}: `), ...items);
  }

  /** The sums at the cursor; the same numbers as in Python's table where the cursor is at the peak. */
  private showSums(): void {
    const { facts, doc, cursor, state } = this;
    const own = new Map(facts.categories.map((row) => [row.category, row]));
    const shown = doc.categories.filter((name) => own.get(name)?.allocations || name === "unknown");
    const rows = shown.map((name) => {
      const level = cursor.levels[doc.categories.indexOf(name)] ?? 0;
      const hidden = state.hidden.includes(name);
      const toggle = h(
        "button",
        {
          "aria-pressed": String(!hidden),
          class: "toggle",
          click: () => this.toggleCategory(name),
        },
        swatch(doc.colors[name]),
        name,
      );
      const row = own.get(name);
      return [
        toggle,
        books.size(level),
        shareText(level, cursor.bytes),
        books.size(row?.at_peak ?? 0),
        books.size(row?.own_peak ?? 0),
      ];
    });
    const total = ["all", books.size(cursor.bytes), "", books.size(facts.peak.bytes), ""];
    const heads = ["category", "at the cursor", "share", "at the peak", "own peak"];
    fill(this.sums, books.table(this.where(), heads, rows, total));
  }

  private where(): string {
    const { facts, cursor } = this;
    const at = cursor.change === facts.peak_change ? "At the peak" : "At the cursor";
    const step = this.stepOf(cursor.change);
    const name = step < 0 ? "" : `, step ${facts.first_step + facts.steps[step].step}`;
    return `${at}${name}: ${timeText(cursor.time_ns)} after the start, on ${facts.device}`;
  }

  private showStatus(): void {
    const { begin, cursor } = this;
    const parts = [`${this.where()}: ${sizeText(cursor.bytes)}`];
    if (begin) {
      const change = cursor.bytes - begin.bytes;
      const took = timeText(Math.abs(cursor.time_ns - begin.time_ns));
      parts.push(`range of ${took}, ${change >= 0 ? "+" : ""}${sizeText(change)}`);
    }
    this.status.textContent = parts.join("; ");
    this.status.dataset.bytes = String(cursor.bytes);
    this.status.dataset.change = String(cursor.change);
  }

  /** The first change in one line; a click leads to all of them. */
  private showAdvice(): void {
    const advice = books.firstAdvice(this.facts);
    this.advice.hidden = advice === null;
    if (!advice) return;
    const text = h("span", { class: "sentence", title: advice.text }, prose(advice.text));
    const toAll = () => this.change({ tab: "books" });
    const whole = h("button", { class: "whole", click: toAll }, TAB_WORDS.books);
    fill(this.advice, h("b", {}, `${advice.kind}: `), text, whole);
  }

  private showTabs(): void {
    for (const tab of this.tabs.querySelectorAll<HTMLElement>("[role=tab]")) {
      const chosen = tab.dataset.tab === this.state.tab;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
    }
    this.panel.setAttribute("aria-labelledby", `tab-${this.state.tab}`);
    const { state, input } = this;
    if (document.activeElement !== input) input.value = state.search;
  }

  private async showPanel(asked: number): Promise<void> {
    const { tab } = this.state;
    if (tab === "who") await this.showWho(asked);
    else if (tab === "bar") await this.showBar(asked);
    else if (tab === "steps") this.showSteps();
    else if (tab === "books") this.showBooks();
    else await this.showCompare(asked);
    this.panel.dataset.tab = tab;
    this.panel.dataset.asked = String(asked);
  }

  private async showWho(asked: number): Promise<void> {
    const who = await this.channel.ask("who", { ...this.look, keys: this.state.keys });
    if (asked !== this.asked) return;
    const { state, facts } = this;
    const groups = GROUPS.map((keys): [string, string] => [keys, keys.replaceAll(",", " \u2192 ")]);
    const measures = Object.entries(MEASURE_WORDS) as [string, string][];
    const first = this.panel.dataset.tab !== "who";
    const controls = h(
      "div",
      { class: "controls" },
      choice("bytes", measures, state.measure, (value) =>
        this.change({ measure: value as Measure }),
      ),
      choice("by", groups, state.keys.join(","), (keys) => this.change({ keys: keys.split(",") })),
      h("button", { click: () => this.saveTable(who) }, "save table"),
    );
    const unit = state.measure === "bytetime" ? (n: number) => `${sizeText(n)}\u00b7s` : sizeText;
    const sums = h("p", { class: "found", "data-bytes": who.bytes }, this.foundText(who, unit));
    const largest = this.largest("Largest", who.largest, unit);
    if (!first) fill(this.panel.firstElementChild ?? this.panel, controls, sums, largest);
    else
      fill(
        this.panel,
        h("div", {}, controls, sums, largest),
        this.whoIcicle.pane.canvas,
        this.whoTable.element,
      );
    this.whoIcicle.show(who.tree, state.keys);
    this.whoTable.show(who.tree, {
      caption: `Who: ${MEASURE_WORDS[state.measure]}`,
      keys: state.keys,
      whole: state.measure === "held" ? facts.peak.bytes : who.allBytes,
      unit,
      compares: false,
      choose: (path) => this.searchFor(path, state.keys),
      ...this.rows,
    });
  }

  /** The first line, module and op, because that is what people ask for; a click shows its bars. */
  private largest(title: string, rows: Largest[], unit: (amount: number) => string): HTMLElement {
    const parts: (Node | string)[] = rows.map((row, i) => {
      const search = () => this.searchFor([row.name], [row.key]);
      const name = h("button", { click: search }, row.name);
      const end = i < rows.length - 1 ? ",\u00a0" : "";
      return h(
        "span",
        {},
        `${i ? "" : `${title}: `}${row.key} `,
        name,
        ` ${unit(row.bytes)}${end}`,
      );
    });
    if (rows.length && rows[0].key !== "line") {
      parts.push(". Lines were not recorded: trace(stacks=True), or run --stacks");
    }
    return h("p", { class: "largest" }, ...parts);
  }

  /** How the rows of a tree's table are sorted, and which are open. */
  private get rows() {
    const { sort, open } = this.state;
    const changed = (newSort: State["sort"], newOpen: string) => {
      this.history.keep(this.state);
      this.state = { ...this.state, sort: newSort, open: newOpen };
      this.remember();
    };
    return { sort, open, changed };
  }

  private foundText(who: Who, unit: (amount: number) => string): string {
    const { state } = this;
    const all = `${unit(who.allBytes)} in ${countText(who.allCount)} allocations`;
    const rest = who.rest ? `; ${sizeText(who.rest)} of it in those that are not drawn` : "";
    const finding = this.facts.findings?.[findingOf(state.only)];
    if (finding && !state.search && state.measure === "held") {
      return `${all} at the cursor, ${books.provedText(finding, who.allBytes)}.`;
    }
    if (!state.search) return `${all}${rest}; shares are of the peak.`;
    return `Found ${unit(who.bytes)} in ${countText(who.count)} allocations, of ${all}${rest}.`;
  }

  private async showBar(asked: number): Promise<void> {
    const rows = await this.channel.ask("rows", { ...this.look, most: 50 });
    if (asked !== this.asked) return;
    const { bar } = this;
    const list = rows.map((row) => [
      h("button", { click: () => this.pin(row.allocation) }, countText(row.row)),
      books.size(row.bytes),
      row.texts.category,
      [row.texts.name, row.texts.shape].filter(Boolean).join(" "),
      row.texts.module,
      row.texts.op,
      row.texts.line,
    ]);
    const heads = ["number", "bytes", "category", "tensor", "module", "op", "line"];
    const largest = books.table("The largest bars at the cursor", heads, list);
    fill(
      this.panel,
      bar ? details(bar, this.doc.source, (like) => this.searchAlike(like)) : null,
      bar
        ? h("button", { click: () => this.unpin() }, "unpin")
        : h("p", {}, "Click a bar to pin it."),
      list.length ? largest : this.noBars(),
    );
  }

  private noBars(): HTMLElement {
    const { search, only } = this.state;
    const among = only === "all" ? "" : ` of "${ONLY_WORDS[only] ?? only}"`;
    if (!search) return h("p", {}, `No bar${among} is alive at the cursor.`);
    return h(
      "p",
      {},
      `No bar${among} at the cursor matches the search. Esc ends the search. `,
      h("button", { click: () => this.endSearch() }, "end the search"),
    );
  }

  private showSteps(): void {
    const go = (step: number) => this.toStep(step);
    const compare = (step: number) => this.compareSteps(step - 1, step);
    fill(this.panel, books.steps(this.facts, { go, compare }));
  }

  private showBooks(): void {
    const { facts } = this;
    const show = (finding: Finding, number: number) => this.showFinding(finding, number);
    fill(
      this.panel,
      books.changes(facts, show),
      facts.answers.length ? h("h2", {}, "Forecasts") : null,
      ...facts.answers.map(books.answer),
      ...(facts.ledgers ?? []).map(books.ledger),
      books.parameters(facts),
      books.health(facts),
      books.costs(facts),
    );
  }

  private async showCompare(asked: number): Promise<void> {
    const sides = await this.sides();
    const usual = this.usualSides(sides);
    const before = sideOf(this.state.before, this.doc) ?? usual[0];
    const after = sideOf(this.state.after, this.doc) ?? usual[1];
    const { keys } = this.state;
    const compared = await this.channel.ask("compare", { keys, before, after });
    const { tree } = compared;
    if (asked !== this.asked) return;
    for (const side of [before, after]) {
      if (sides.some(([, each]) => sideText(each) === sideText(side))) continue;
      sides.push([`event ${countText(side.change)}`, side]);
    }
    const options = sides.map(([text, side]): [string, string] => [sideText(side), text]);
    const groups = GROUPS.map((k): [string, string] => [k, k.replaceAll(",", " \u2192 ")]);
    fill(
      this.panel,
      h(
        "div",
        { class: "controls" },
        choice("before", options, sideText(before), (side) => this.change({ before: side })),
        choice("after", options, sideText(after), (side) => this.change({ after: side })),
        choice("by", groups, keys.join(","), (k) => this.change({ keys: k.split(",") })),
      ),
      h("p", { "data-bytes": tree.bytes, title: exactText(tree.bytes) }, changeText(compared)),
      this.largest("Largest changes", compared.largest, signed),
      this.compareIcicle.pane.canvas,
      this.compareTable.element,
    );
    this.compareIcicle.show(tree, keys, true);
    this.compareTable.show(tree, {
      caption: "What changed",
      keys,
      whole: 0,
      unit: sizeText,
      compares: true,
      choose: (path) => this.searchFor(path, keys),
      ...this.rows,
    });
  }

  /** The moments that can be compared, of every trace of the page. */
  private async sides(): Promise<[string, Side][]> {
    const found: [string, Side][] = [];
    for (const [set, facts] of this.doc.sets.entries()) {
      const name = this.doc.sets.length > 1 ? `${facts.name}, ${facts.device}: ` : "";
      found.push([`${name}peak`, { set, change: facts.peak_change }]);
      found.push([`${name}end`, { set, change: facts.changes - 1 }]);
      found.push([`${name}begin`, { set, change: -1 }]);
      if (set === this.state.set) found.push([`${name}cursor`, { set, change: this.state.cursor }]);
      for (const i of facts.steps.keys()) {
        if (i >= 200) break;
        const text = `${name}peak of step ${facts.first_step + facts.steps[i].step}`;
        found.push([text, { set, change: await this.stepPeak(set, i) }]);
      }
    }
    return found;
  }

  private readonly stepPeaks = new Map<string, number>();

  private async stepPeak(set: number, step: number): Promise<number> {
    const key = `${set} ${step}`;
    const known = this.stepPeaks.get(key);
    if (known !== undefined) return known;
    const [from, to] = this.places[set].steps[step];
    const found = await this.channel.ask("peak", { set, axis: "events", from, to });
    this.stepPeaks.set(key, found.change);
    return found.change;
  }

  private usualSides(sides: [string, Side][]): [Side, Side] {
    const peak = (set: number) => ({ set, change: this.doc.sets[set].peak_change });
    if (this.doc.sets.length > 1) {
      const device = this.doc.sets[0].device;
      const other = this.doc.sets.findIndex((set, i) => i > 0 && set.device === device);
      return [peak(0), peak(Math.max(other, 1))];
    }
    const steps = sides.filter(([text]) => text.includes("step"));
    if (steps.length > 1) return [steps[0][1], steps[steps.length - 1][1]];
    return [{ set: 0, change: -1 }, peak(0)];
  }

  // -------------------------------------------------------------- what a person does

  private stepOf(change: number): number {
    const steps = this.places[this.state.set].steps;
    return steps.findIndex(([, last]) => change <= last);
  }

  private toSet(set: number): void {
    this.history.keep(this.state);
    this.state = { ...this.state, set };
    this.drawing = null;
    this.openSet(false).then(() => this.remember());
  }

  private toPeak(): void {
    this.goTo(this.facts.peak_change, this.peak.x);
  }

  /** Moves the cursor there, and what is seen if it is not seen. */
  private goTo(change: number, x: number): void {
    const { from, to } = this.state;
    const half = (to - from) / 2;
    const seen = from <= x && x <= to;
    this.change({ cursor: change, ...(seen ? {} : { from: x - half, to: x + half }) });
  }

  private async toStep(step: number): Promise<void> {
    const { set, axis } = this.state;
    const row = this.facts.steps[step];
    if (!row) return;
    const range = this.places[set].steps[step];
    const [from, to] = axis === "time" ? [row.start_ns, row.end_ns] : range;
    this.change({ cursor: await this.stepPeak(set, step), from, to });
  }

  private nextStep(by: number): void {
    const now = this.stepOf(this.state.cursor);
    const last = this.facts.steps.length - 1;
    this.toStep(Math.max(0, Math.min(last, now < 0 ? last : now + by)));
  }

  private async compareSteps(before: number, after: number): Promise<void> {
    const { set } = this.state;
    const [one, other] = [await this.stepPeak(set, before), await this.stepPeak(set, after)];
    const [a, b] = [one, other].map((change) => sideText({ set, change }));
    const byTime = this.state.axis === "time";
    const { steps } = this.facts;
    const ranges = this.places[set].steps;
    const from = byTime ? steps[before].start_ns : ranges[before][0];
    const to = byTime ? steps[after].end_ns : ranges[after][1];
    const seen = { from, to, low: 0, high: 0, cursor: other };
    this.change({ ...seen, tab: "compare", before: a, after: b });
  }

  private fit(): void {
    const [from, to] = this.bounds;
    this.change({ from, to, low: 0, high: 0 });
  }

  private zoom(factor: number, around: number, keep = true): void {
    const { from, to } = this.state;
    const at = from + (to - from) * around;
    this.change({ from: at - (at - from) * factor, to: at + (to - at) * factor }, keep);
  }

  private pan(share: number, keep = true): void {
    const by = (this.state.to - this.state.from) * share;
    this.change({ from: this.state.from + by, to: this.state.to + by }, keep);
  }

  private async stepCursor(by: number): Promise<void> {
    const { set, axis } = this.state;
    const at = await this.channel.ask("moment", { set, axis, change: this.state.cursor + by });
    this.goTo(at.change, at.x);
  }

  private toggleRange(): void {
    const { begin, cursor, measure } = this.state;
    const open = begin === null;
    const now = open ? (measure === "held" ? "grew" : measure) : "held";
    this.change({ begin: open ? cursor : null, measure: now });
    this.buildControls();
  }

  private toggleCategory(name: string): void {
    const { hidden } = this.state;
    const without = hidden.filter((each) => each !== name);
    this.change({ hidden: without.length < hidden.length ? without : [...hidden, name] });
  }

  private toggleTheme(): void {
    this.change({ theme: isDark() ? "light" : "dark" });
  }

  private applyTheme(): void {
    const { dataset } = document.documentElement;
    if (this.state.theme === "system") delete dataset.theme;
    else dataset.theme = this.state.theme;
  }

  /** What is typed next replaces the old search. */
  private toSearch(): void {
    this.input.focus();
    this.input.select();
  }

  private endSearch(): void {
    this.input.value = "";
    this.change({ search: "" });
  }

  private searchFor(path: string[], keys: string[]): void {
    const own = path.map((name) => name.replace(/ \(was \d+\)$/, "")); // of a line that moved
    const words = own.map((name, i) => (name ? `^${keys[i]}:${escaped(name)}$` : ""));
    this.change({ search: words.filter(Boolean).join(" ") });
  }

  private searchWhere(line: string, module: string): void {
    const words = [
      line && `^line:${escaped(line)}$`,
      !line && module && `^module:${escaped(module)}$`,
    ];
    this.change({ search: words.filter(Boolean).join(" "), tab: "who" });
  }

  /** Exactly the finding's allocations, at the moment at which they are its bytes. */
  private async showFinding(finding: Finding, number: number): Promise<void> {
    if (finding.at === null) {
      this.searchWhere(finding.line, finding.module);
      return;
    }
    const { set, axis } = this.state;
    const at = await this.channel.ask("moment", { set, axis, change: finding.at });
    const only: Only = `finding ${number}`;
    const [from, to] = this.bounds;
    const seen = this.state.from <= at.x && at.x <= this.state.to && finding.kind !== "growth";
    const window = seen ? {} : { from, to, low: 0, high: 0 };
    this.change({
      ...window,
      ...{ only, cursor: at.change, begin: null, measure: "held", search: "", tab: "who" },
    });
    this.buildControls();
  }

  private searchAlike(bar: Bar): void {
    const keys = ["category", "module", "op", "line", "shape"];
    this.searchFor(
      keys.map((key) => bar.texts[key]),
      keys,
    );
  }

  private async pin(allocation: number, keep = true): Promise<void> {
    const { set } = this.state;
    this.bar = await this.channel.ask("bar", { set, allocation });
    if (keep) this.change({ pinned: allocation, tab: "bar" });
  }

  private unpin(): void {
    this.bar = null;
    this.change({ pinned: null });
  }

  private savePicture(): void {
    const { strip, bands, area, map } = this.charts;
    const panes = [strip, bands, area, map].map((pane) => pane.canvas);
    const whole = h("canvas", {
      width: map.canvas.width,
      height: panes.reduce((total, pane) => total + pane.height, 0),
    });
    const context = whole.getContext("2d");
    if (!context) return;
    context.fillStyle = getComputedStyle(document.body).backgroundColor;
    context.fillRect(0, 0, whole.width, whole.height);
    let top = 0;
    for (const pane of panes) {
      context.drawImage(pane, 0, top);
      top += pane.height;
    }
    whole.toBlob((blob) => blob && save(`${this.facts.name}.png`, [blob], "image/png"));
  }

  private saveTable(who: Who): void {
    const lines = [[...this.state.keys, "bytes", "allocations"]];
    const walk = (node: Who["tree"], path: string[]) => {
      if (node.children.length === 0) {
        lines.push([...path, String(node.bytes), String(node.count)]);
      }
      for (const child of node.children) walk(child, [...path, child.name]);
    };
    walk(who.tree, []);
    const quoted = (text: string) => `"${text.replaceAll('"', '""')}"`;
    const text = lines.map((cells) => cells.map(quoted).join(",")).join("\n");
    save(`${this.facts.name}.csv`, [`${text}\n`], "text/csv");
  }

  // -------------------------------------------------------------- mouse, wheel and keys

  private listen(): void {
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("hashchange", () => {
      const state = fromHash(location.hash, this.usual);
      if (toHash(state, this.usual) === toHash(this.state, this.usual)) return;
      this.history.keep(this.state);
      this.state = this.doc.sets[state.set] ? state : { ...state, set: 0 };
      this.applyTheme();
      this.openSet(true);
    });
    let first = true; // it tells of the size that is known already
    const resized = new ResizeObserver(() => {
      if (first) {
        first = false;
        return;
      }
      this.drawStrip().then(() => this.draw());
      this.whoIcicle.draw();
    });
    for (const pane of this.charts.all) resized.observe(pane.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.refresh());
    this.tabs.addEventListener("keydown", (event) => this.tabKey(event));
    window.addEventListener("beforeprint", () => {
      document.documentElement.dataset.theme = "light"; // paper is white
      this.paint();
      this.whoIcicle.draw();
    });
    window.addEventListener("afterprint", () => {
      this.applyTheme();
      this.paint();
    });
    const { strip, area, map, bands } = this.charts;
    for (const pane of [area, map, bands]) {
      pane.canvas.addEventListener("wheel", (event) => this.wheel(event, pane), { passive: false });
      pane.canvas.addEventListener("dblclick", () => this.fit());
    }
    area.canvas.addEventListener("pointerdown", (event) => this.drag(event, "area"));
    bands.canvas.addEventListener("pointerdown", (event) => this.drag(event, "area"));
    map.canvas.addEventListener("pointerdown", (event) => this.drag(event, "map"));
    strip.canvas.addEventListener("pointerdown", (event) => this.brush(event));
    area.canvas.addEventListener("pointermove", (event) => this.hoverArea(event));
    map.canvas.addEventListener("pointermove", (event) => this.hoverMap(event));
    for (const pane of [area, map]) {
      pane.canvas.addEventListener("pointerleave", () => {
        this.hover = null;
        this.showTip("", null);
        this.paint();
      });
    }
  }

  private wheel(event: WheelEvent, pane: { shareOf: (e: WheelEvent) => number }): void {
    event.preventDefault();
    if (event.timeStamp - this.wheeled > 600) this.history.keep(this.state);
    this.wheeled = event.timeStamp;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.pan((event.deltaX || event.deltaY) / 1000, false);
    } else this.zoom(1.0016 ** event.deltaY, pane.shareOf(event), false);
  }

  /** Dragging moves; with Shift it is a box that is looked into; without moving it is a click. */
  private drag(event: PointerEvent, where: "area" | "map"): void {
    if (event.button !== 0) return;
    const pane = this.charts[where];
    const { from, to, low } = this.state;
    const high = this.state.high || (this.drawing?.highest ?? 1);
    const begin = { x: pane.shareOf(event), y: pane.heightOf(event) };
    this.history.keep(this.state);
    let moved = false;
    const move = (e: PointerEvent) => {
      const x = pane.shareOf(e);
      moved ||= Math.abs(e.clientX - event.clientX) + Math.abs(e.clientY - event.clientY) > 4;
      if (!moved || event.shiftKey) return;
      const by = (begin.x - x) * (to - from);
      const up = this.state.high ? (begin.y - pane.heightOf(e)) * (high - low) : 0;
      const vertical = where === "map" && this.state.high ? { low: low + up, high: high + up } : {};
      this.change({ from: from + by, to: to + by, ...vertical }, false);
    };
    const end = (e: PointerEvent) => {
      window.removeEventListener("pointermove", move);
      window.removeEventListener("pointerup", end);
      if (!moved) this.click(e, where);
      else if (event.shiftKey) {
        const xs = [begin.x, pane.shareOf(e)].sort((a, b) => a - b);
        const ys = [begin.y, pane.heightOf(e)].sort((a, b) => a - b);
        const box = { from: from + xs[0] * (to - from), to: from + xs[1] * (to - from) };
        const vertical = { low: low + ys[0] * (high - low), high: low + ys[1] * (high - low) };
        this.change(where === "map" && ys[1] - ys[0] > 0.02 ? { ...box, ...vertical } : box, false);
      }
    };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", end);
  }

  private async click(event: PointerEvent, where: "area" | "map"): Promise<void> {
    const { set, axis } = this.state;
    const x = this.xAt(event, where);
    const at = await this.channel.ask("moment", { set, axis, x });
    const bar = where === "map" ? await this.barUnder(event) : null;
    this.bar = bar ?? this.bar;
    const pinned = bar ? { pinned: bar.allocation, tab: "bar" as Tab } : {};
    this.change({ cursor: at.change, ...pinned }, false);
  }

  private brush(event: PointerEvent): void {
    const pane = this.charts.strip;
    const [first, last] = this.bounds;
    const begin = pane.shareOf(event);
    this.history.keep(this.state);
    const show = (e: PointerEvent) => {
      const [left, right] = [begin, pane.shareOf(e)].sort((a, b) => a - b);
      const half =
        right - left < 0.005 ? (this.state.to - this.state.from) / (last - first) / 2 : 0;
      const at = (share: number) => first + share * (last - first);
      this.change({ from: at(left - half), to: at(right + half) }, false);
    };
    const end = (e: PointerEvent) => {
      show(e);
      window.removeEventListener("pointermove", show);
      window.removeEventListener("pointerup", end);
    };
    window.addEventListener("pointermove", show);
    window.addEventListener("pointerup", end);
  }

  private xAt(event: { clientX: number }, where: "area" | "map"): number {
    const { from, to } = this.state;
    return from + this.charts[where].shareOf(event) * (to - from);
  }

  private async hoverArea(event: PointerEvent): Promise<void> {
    const { set, axis } = this.state;
    const x = this.xAt(event, "area");
    this.hover = x;
    const at = await this.channel.ask("moment", { set, axis, x });
    if (this.hover !== x) return;
    const parts = this.doc.categories
      .map((name, i): [string, number] => [name, at.levels[i]])
      .filter(([, bytes]) => bytes > 0)
      .map(([name, bytes]) => `${name} ${sizeText(bytes)}`);
    this.showTip(`${timeText(at.time_ns)}: ${sizeText(at.bytes)}\n${parts.join("\n")}`, event);
    this.paint();
  }

  private async hoverMap(event: PointerEvent): Promise<void> {
    const x = this.xAt(event, "map");
    const began = performance.now();
    this.hover = x;
    const bar = await this.barUnder(event);
    performance.measure("hover", { start: began, end: performance.now() });
    if (this.hover !== x) return;
    this.showTip(bar ? inShort(bar) : "", event);
    this.paint();
  }

  private barUnder(event: PointerEvent): Promise<Bar | null> {
    const pane = this.charts.map;
    const { from, to, low } = this.state;
    const high = this.state.high || (this.drawing?.highest ?? 1);
    return this.channel.ask("hit", {
      ...this.look,
      from,
      to,
      x: this.xAt(event, "map"),
      bytes:
        (this.state.high ? low : 0) + pane.heightOf(event) * (high - (this.state.high ? low : 0)),
      reachX: (0.5 * (to - from)) / pane.pictureWidth,
      reachBytes: high / pane.pictureHeight,
    });
  }

  private showTip(text: string, event: MouseEvent | null): void {
    this.tip.textContent = text;
    this.tip.hidden = !text;
    if (!event || !text) return;
    const width = Math.min(360, window.innerWidth - 16);
    this.tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, window.innerWidth - width))}px`;
    this.tip.style.top = `${Math.min(event.clientY + 16, window.innerHeight - 60)}px`;
  }

  private tabKey(event: KeyboardEvent): void {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.stopPropagation();
    event.preventDefault();
    const at = (TABS.indexOf(this.state.tab) + by + TABS.length) % TABS.length;
    this.change({ tab: TABS[at] });
    this.tabs.querySelector<HTMLElement>(`#tab-${TABS[at]}`)?.focus();
  }

  private key(event: KeyboardEvent): void {
    const target = event.target as HTMLElement;
    if (this.help.open) return;
    if (target === this.input && event.key === "Enter") this.input.blur();
    if (target === this.input && event.key === "Escape") {
      this.input.blur();
      this.endSearch();
    }
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || event.ctrlKey || event.metaKey) return;
    const actions: Record<string, () => void> = {
      w: () => this.zoom(0.7, this.cursorShare()),
      s: () => this.zoom(1 / 0.7, this.cursorShare()),
      a: () => this.pan(-0.2),
      d: () => this.pan(0.2),
      p: () => this.toPeak(),
      f: () => this.fit(),
      r: () => this.toggleRange(),
      "[": () => this.nextStep(-1),
      "]": () => this.nextStep(1),
      "/": () => this.toSearch(),
      "?": () => this.help.showModal(),
      ArrowLeft: () => this.stepCursor(-1),
      ArrowRight: () => this.stepCursor(1),
      Backspace: () => this.undo(),
      Escape: () => (this.state.search ? this.endSearch() : this.unpin()),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  private cursorShare(): number {
    const { from, to } = this.state;
    const share = (this.cursor.x - from) / (to - from);
    return share >= 0 && share <= 1 ? share : 0.5;
  }
}

/**
 * What is seen first: the peak's step and around it, because a whole run is too much to begin with.
 * If memory grows from step to step, it is the whole run, which shows the stairs. By events where
 * idle time would squeeze everything that happened.
 */
function opening(facts: Facts): Pick<State, "axis" | "from" | "to"> {
  const axis = books.isMostlyIdle(facts) ? "events" : "time";
  const byTime = axis === "time";
  const { steps, begin_ns, end_ns, changes, peak } = facts;
  const [first, last] = byTime
    ? [begin_ns, Math.max(end_ns, begin_ns + 1)]
    : [-1, Math.max(changes, 1)];
  const at = steps.findIndex((row) => row.start_ns <= peak.time_ns && peak.time_ns <= row.end_ns);
  const grows = facts.findings?.some((row) => row.kind === "growth");
  if (steps.length < 2 || at < 0 || grows) return { axis, from: first, to: last };
  const [begin, end] = byTime
    ? [steps[at].start_ns, steps[at].end_ns]
    : [steps[at - 1]?.last_change ?? first, steps[at].last_change];
  const around = Math.max((end - begin) / 2, byTime ? 100 : 4);
  // Where memory ran out has to be in sight.
  const failed = facts.failures.some((failure) => failure.time_ns >= peak.time_ns);
  const to = failed ? last : Math.min(end + around, last);
  return { axis, from: Math.max(begin - around, first), to };
}

/** There is room for what is reserved, and for what the device has in use if that leaves enough. */
function leastTop(facts: Facts, room: Room): number {
  const most = mostReserved(facts);
  return room === "device" || !isFarAbove(facts) ? Math.max(most, mostUsed(facts)) : most;
}

const mostReserved = ({ reserved }: Facts) =>
  reserved.bytes.reduce((most, bytes) => Math.max(most, bytes), 0);
const mostUsed = ({ device_use }: Facts) =>
  device_use.reduce((most, use) => Math.max(most, use.bytes), 0);
const isFarAbove = (facts: Facts) =>
  mostUsed(facts) > 2 * Math.max(mostReserved(facts), facts.peak.bytes);

/** What changed, and whether there are more blocks, larger ones, or larger inputs. */
function changeText({ tree, counts, inputs }: Comparison): string {
  const [old, now] = counts;
  const size = tree.bytes > 0 ? "larger" : "smaller";
  const blocks =
    old === now
      ? `as many allocations, ${size} ones`
      : `${countText(Math.abs(now - old))} ${now > old ? "more" : "fewer"} allocations`;
  const parts = [`Change ${signed(tree.bytes)}`, ...(tree.bytes ? [blocks] : [])];
  const times = inputs[0] > 0 ? inputs[1] / inputs[0] : 1;
  if (times > 1.01 || (times > 0 && times < 0.99)) {
    parts.push(`the inputs are ${times.toFixed(times < 10 ? 2 : 0)} times as large`);
  }
  return `${parts.join("; ")}.`;
}

const sideText = ({ set, change }: Side) => `${set}:${change}`;

/** Null where the page has no such moment. */
function sideOf(text: string, doc: Document): Side | null {
  const [set, change] = text.split(":").map(Number);
  const facts = text ? doc.sets[set] : undefined;
  return facts && change >= -1 && change < facts.changes ? { set, change } : null;
}

export function isDark(): boolean {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) return chosen === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}
