// The page's state, and how every change of it is drawn. What is around the pictures is frame.ts.

import * as actions from "./actions";
import type { Channel } from "./channel";
import { Charts, type View } from "./charts";
import type { LegendEntry } from "./colors";
import type { Axis } from "./dataset";
import type { CategoryRow, Document, Facts } from "./document";
import type { Bar, Drawing, Look, MomentFacts, Strip } from "./engine";
import { Frame, isDark } from "./frame";
import { listen } from "./gestures";
import { leastTop, opening } from "./opening";
import type { Places } from "./places";
import { fromHash, GROUPS, History, LINES, OWN_LINES, type State, toHash } from "./state";
import type { Moment } from "./tree";

const WINDOW = ["from", "to", "low", "high"];
const REST_MS = 120; // without a move, after which each bar is drawn
const nameOf = (row: CategoryRow) => row.category;
const NOWHERE: MomentFacts = { change: -1, x: 0, time_ns: 0, levels: [], bytes: 0 };

export class App {
  state: State;
  readonly usual: State;
  readonly history = new History();
  readonly charts: Charts;
  readonly frame: Frame;
  drawing: Drawing | null = null;
  cursor = NOWHERE;
  peak = NOWHERE;
  bar: Bar | null = null;
  hover: number | null = null;
  asked = 0; // the latest question about who holds what
  private strip: Strip | null = null;
  private begin: MomentFacts | null = null;
  private rest = 0; // the timer until each bar is drawn
  private busy = false;
  private again = false;
  private soon = 0; // the timer until the address is written

  constructor(
    readonly doc: Document,
    readonly channel: Channel,
    readonly places: Places[],
    root: HTMLElement,
  ) {
    this.charts = new Charts(window.innerWidth < 600 ? 60 : 70);
    this.usual = this.usualState();
    this.state = fromHash(location.hash, this.usual);
    if (!this.doc.sets[this.state.set]) this.state.set = 0;
    this.frame = new Frame(this, root);
  }

  async start(): Promise<void> {
    this.applyTheme();
    this.frame.build();
    await this.openSet(location.hash.length > 1);
    listen(this);
  }

  get facts(): Facts {
    return this.doc.sets[this.state.set];
  }

  /** Whether the page has two programs, or two versions of one, to compare. */
  get isPair(): boolean {
    return !this.doc.job && new Set(this.doc.sets.map((set) => set.name)).size > 1;
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
      tab: this.doc.job ? "ranks" : this.isPair ? "compare" : "timeline",
      before: "",
      after: "",
      sort: "bytes",
      open: "",
      theme: "system",
      room: "categories",
    };
  }

  get bounds(): [number, number] {
    const { begin_ns, end_ns, changes } = this.facts;
    if (this.state.axis === "events") return [-1, Math.max(changes, 1)];
    return [begin_ns, Math.max(end_ns, begin_ns + 1)];
  }

  /** Every change of what is shown comes through here. Looking elsewhere changes no numbers. */
  change(what: Partial<State>, keep = true): void {
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

  keepInBounds(): void {
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
  remember(): void {
    window.clearTimeout(this.soon);
    this.soon = window.setTimeout(() => {
      try {
        history.replaceState(null, "", `#${toHash(this.state, this.usual)}`);
      } catch {
        // A page inside a notebook has no address of its own.
      }
    }, 100);
  }

  async undo(): Promise<void> {
    const before = this.history.back();
    if (!before) return;
    const { set, axis, theme } = this.state;
    this.state = before;
    this.remember();
    if (before.theme !== theme) this.applyTheme();
    if (before.set !== set || before.axis !== axis) await this.openSet(true);
    else await this.refresh();
    this.frame.controlsAnew();
  }

  async openSet(asItIs: boolean): Promise<void> {
    const { set } = this.state;
    if (!asItIs) {
      this.state = { ...this.usual, ...opening(this.facts), set, tab: this.state.tab };
      this.state.cursor = this.facts.peak_change;
    }
    const { axis } = this.state;
    const change = this.facts.peak_change;
    this.peak = await this.channel.ask("moment", { set, axis, change });
    this.keepInBounds();
    this.frame.showTabs();
    await this.drawStrip();
    if (this.state.pinned !== null) await actions.pin(this, this.state.pinned, false);
    else this.bar = null;
    await Promise.all([this.refresh(), this.frame.opened()]);
  }

  async setAxis(axis: Axis): Promise<void> {
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

  get moment(): Moment {
    const { measure, cursor, begin } = this.state;
    const other = begin ?? -1;
    const range = measure !== "held";
    return {
      measure,
      at: range ? Math.max(cursor, other) : cursor,
      from: range ? Math.min(cursor, other) : other,
    };
  }

  /** By what the tables of who holds how much are grouped. */
  get keys(): string[] {
    if (this.state.tab !== "lines") return this.state.keys;
    return this.facts.calls_libraries ? OWN_LINES : LINES;
  }

  get look(): Look {
    const { set, axis, layout, color, hidden, only, search } = this.state;
    return { set, axis, layout, color, hidden, only, search, dark: isDark(), moment: this.moment };
  }

  /** Draws again and asks again; of many calls in a row only the last one counts. */
  async refresh(): Promise<void> {
    const { set, axis, cursor, begin } = this.state;
    const asked = ++this.asked;
    this.frame.showTabs();
    const drawn = this.draw();
    const [now, other] = await Promise.all([
      this.channel.ask("moment", { set, axis, change: cursor }),
      begin === null ? null : this.channel.ask("moment", { set, axis, change: begin }),
    ]);
    if (asked !== this.asked) return;
    this.cursor = now;
    this.begin = other;
    this.paint();
    this.frame.show(other);
    await Promise.all([drawn, this.frame.showPanel(asked)]);
  }

  /** Draws what is seen; coarse where each bar would take long, and each bar once it rests. */
  async draw(): Promise<void> {
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

  async drawEach(): Promise<void> {
    const began = performance.now();
    await this.drawOnce(false);
    performance.measure("drawEach", { start: began, end: performance.now() });
  }

  async drawOnce(soon: boolean): Promise<void> {
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
    if (this.bar && this.bottomOf(this.bar) === null)
      await actions.pin(this, this.bar.allocation, false);
    this.paint();
    this.frame.showLegend();
  }

  highestAddress(): number {
    const last = this.facts.regions[this.facts.regions.length - 1];
    return last ? last[1] + last[2] : 1;
  }

  async drawStrip(): Promise<void> {
    this.charts.measure();
    const { strip } = this.charts;
    const { set, axis } = this.state;
    const [width, height] = [strip.pictureWidth, strip.pictureHeight];
    this.strip = await this.channel.ask("strip", { set, axis, width, height });
    strip.put(this.strip.area, width, height, this.bounds);
  }

  /** The colours of the picture of categories. */
  categories(): LegendEntry[] {
    const own = new Set(this.facts.categories.filter((row) => row.allocations).map(nameOf));
    return this.doc.categories
      .filter((name) => own.has(name))
      .map((name) => ({ name, color: this.doc.colors[name], word: "" }));
  }

  /** Only what lies on top of the pictures. */
  paint(): void {
    this.charts.draw(this.view());
  }

  view(): View {
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

  applyTheme(): void {
    const { dataset } = document.documentElement;
    if (this.state.theme === "system") delete dataset.theme;
    else dataset.theme = this.state.theme;
  }
}
