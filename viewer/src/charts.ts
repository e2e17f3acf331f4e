// The pictures: the whole trace as a strip, bands of steps and modules, categories, and the map.

import type { Dataset } from "./dataset";
import type { Document, Facts } from "./document";
import type { Drawing, Strip } from "./engine";
import { countText, sizeText, ticks, tickText } from "./format";
import { label, Pane } from "./pane";
import type { Places } from "./places";
import type { State } from "./state";

type Bounds = ReturnType<Dataset["bounds"]>;

const PHASE_COLORS = ["#8899aa", "#999933", "#4477aa", "#44aaaa", "#aa4499", "#ddaa33"];
const MODULE_COLORS = ["#5577aa", "#557799", "#55aa99", "#779955", "#997755", "#995577"];
const FAILED = "#dd4433";
const AXIS = 18; // pixels for the times below a picture

export interface View {
  state: State;
  facts: Facts;
  places: Places;
  document: Document;
  bounds: Bounds;
  cursorX: number; // on the axis
  beginX: number | null; // of the range
  hoverX: number | null;
  peakX: number;
  drawing: Drawing | null;
  strip: Strip | null;
  bar: { left: number; right: number; low: number; high: number } | null;
}

export class Charts {
  readonly strip: Pane;
  readonly bands: Pane;
  readonly area: Pane;
  readonly map: Pane;

  constructor(left: number) {
    this.strip = new Pane("strip", "Overview: all memory over the whole trace", left);
    this.bands = new Pane("bands", "Steps, phases and modules over time", left);
    this.area = new Pane("area", "Memory over time, by category", left, AXIS);
    this.map = new Pane("map", "Every allocation as a bar", left, AXIS);
  }

  get all(): Pane[] {
    return [this.strip, this.bands, this.area, this.map];
  }

  measure(): void {
    for (const pane of this.all) pane.measure();
  }

  draw(view: View): void {
    const ink = getComputedStyle(this.area.canvas).color;
    this.drawStrip(view, ink);
    this.drawBands(view, ink);
    this.drawArea(view, ink);
    this.drawMap(view, ink);
  }

  private drawStrip(view: View, ink: string): void {
    const pane = this.strip;
    const context = pane.begin();
    const [from, to] = view.bounds;
    const x = (at: number) => pane.xOf((at - from) / (to - from));
    const left = x(view.state.from);
    const right = Math.max(x(view.state.to), left + 2);
    context.fillStyle = ink;
    context.globalAlpha = 0.22;
    context.fillRect(pane.left, 0, Math.max(left - pane.left, 0), pane.height);
    context.fillRect(right, 0, Math.max(pane.width - right, 0), pane.height);
    context.globalAlpha = 1;
    context.strokeStyle = ink;
    context.strokeRect(left + 0.5, 0.5, right - left - 1, pane.height - 1);
    context.textAlign = "right";
    context.fillText("all", pane.left - 6, pane.height / 2);
    context.textAlign = "left";
    vertical(context, x(view.peakX), pane.height, ink, [3, 2]);
  }

  private drawBands(view: View, ink: string): void {
    const pane = this.bands;
    const context = pane.begin();
    const { facts, places, state } = view;
    const byTime = state.axis === "time";
    const span = (i: number, begin: number, end: number, exact: [number, number][]) =>
      byTime ? [begin, end] : exact[i];
    const filled = new Map<number, number>(); // per row, the last pixel with a narrow band
    const band = (
      range: number[],
      top: number,
      high: number,
      color: string,
      text: string,
      keepsEnd = false,
    ) => {
      const left = Math.max(pane.xOf(share(state, range[0])), pane.left);
      const right = Math.min(pane.xOf(share(state, range[1])), pane.width);
      if (right <= pane.left || left >= pane.width) return;
      if (right - left < 1) {
        // Of those that share a pixel the first is seen.
        const pixel = Math.floor(left);
        if (filled.get(top) === pixel) return;
        filled.set(top, pixel);
      }
      context.fillStyle = color;
      context.fillRect(left, top, Math.max(right - left - 0.5, 0.5), high - 1);
      context.fillStyle = "#fff";
      label(context, text, left + 3, top + high / 2, right - left - 6, keepsEnd);
    };
    facts.steps.forEach((row, i) => {
      const range = span(i, row.start_ns, row.end_ns, places.steps);
      const color = i % 2 ? "#5b6470" : "#6d7783";
      band(range, 0, 15, color, `step ${facts.first_step + row.step}`);
    });
    facts.phases.forEach(([phase, begin, end], i) => {
      const range = span(i, begin, end, places.phases);
      band(range, 15, 13, PHASE_COLORS[phase], view.document.phases[phase]);
    });
    facts.modules.forEach(([name, depth, begin, end], i) => {
      const range = span(i, begin, end, places.modules);
      const color = MODULE_COLORS[name % MODULE_COLORS.length];
      band(range, 28 + depth * 12, 12, color, view.document.strings[name], true);
    });
    context.fillStyle = ink;
    context.textAlign = "right";
    ["step", "phase", "module"].forEach((text, i) => {
      context.fillText(text, pane.left - 6, [8, 22, 36][i]);
    });
    context.textAlign = "left";
  }

  private drawArea(view: View, ink: string): void {
    const pane = this.area;
    const context = pane.begin([view.state.from, view.state.to]);
    const top = view.drawing?.top ?? 1;
    const y = (bytes: number) => pane.floor * (1 - bytes / top);
    bytesAxis(context, pane, 0, top, ink);
    this.lines(context, view, y, ink);
    this.leaks(context, view);
    this.marks(context, view, pane, ink, true);
  }

  /** What the allocator holds, and what everybody holds on the device. */
  private lines(
    context: CanvasRenderingContext2D,
    view: View,
    y: (bytes: number) => number,
    ink: string,
  ): void {
    const { facts, places, state } = view;
    const pane = this.area;
    context.save();
    context.beginPath();
    context.rect(pane.left, 0, pane.width - pane.left, pane.floor);
    context.clip();
    const { times_ns, bytes } = facts.reserved;
    const xs = state.axis === "time" ? times_ns : places.reserved;
    context.strokeStyle = ink;
    context.lineWidth = 1.4;
    context.beginPath();
    for (let i = 0; i < bytes.length; i++) {
      const x = pane.xOf(share(state, xs[i]));
      if (i > 0) context.lineTo(x, y(bytes[i - 1]));
      context.lineTo(x, y(bytes[i]));
    }
    if (bytes.length) context.lineTo(pane.width, y(bytes[bytes.length - 1]));
    context.stroke();
    context.lineWidth = 1;
    context.fillStyle = ink;
    if (bytes.length) {
      const begun = xs.findLastIndex((x) => x <= state.from);
      const at = Math.max(y(bytes[Math.max(begun, 0)]) - 8, 8);
      halo(context, "reserved", pane.left + 4, at, pane);
    }
    this.deviceUse(context, view, y, ink);
    context.restore();
  }

  /** NVML's readings; between two of them nothing is known, so the line is dashed. */
  private deviceUse(
    context: CanvasRenderingContext2D,
    view: View,
    y: (bytes: number) => number,
    ink: string,
  ): void {
    const { facts, places, state } = view;
    const pane = this.area;
    const xs = facts.device_use.map((use, i) =>
      pane.xOf(share(state, state.axis === "time" ? use.time_ns : places.use[i])),
    );
    if (xs.length === 0) return;
    context.strokeStyle = context.fillStyle = ink;
    context.setLineDash([5, 4]);
    context.beginPath();
    facts.device_use.forEach((use, i) => {
      context[i ? "lineTo" : "moveTo"](xs[i], y(use.bytes));
    });
    context.stroke();
    context.setLineDash([]);
    facts.device_use.forEach((use, i) => {
      context.strokeRect(xs[i] - 3, y(use.bytes) - 3, 6, 6);
    });
    const first = xs.findIndex((x) => x >= pane.left);
    const [x0, x1] = [xs[first - 1], xs[first]];
    const [y0, y1] = [first - 1, first].map((i) => y(facts.device_use[i]?.bytes ?? 0));
    const x = Math.max(x0 ?? x1, pane.left) + 8;
    const at = x0 === undefined ? y1 : y0 + ((y1 - y0) * (x - x0)) / (x1 - x0);
    if (first >= 0 && x < pane.width - 60) halo(context, "device used, by NVML", x, at + 10, pane);
  }

  /** Triangles where allocations begin that each step leaves behind. */
  private leaks(context: CanvasRenderingContext2D, view: View): void {
    const { places, state } = view;
    const pane = this.area;
    const xs: number[] = [];
    for (const leak of places.leaks) {
      const x = pane.xOf(share(state, state.axis === "time" ? leak.time_ns : leak.change));
      const last = xs[xs.length - 1] ?? Number.NEGATIVE_INFINITY;
      if (x >= pane.left && x <= pane.width && x - last >= 3) xs.push(x);
    }
    context.fillStyle = FAILED;
    for (const x of xs) {
      context.beginPath();
      context.moveTo(x - 4, 0);
      context.lineTo(x + 4, 0);
      context.lineTo(x, 9);
      context.fill();
    }
    if (xs.length === 0) return;
    const right = xs[0] - pane.left > 40; // of the words
    context.textAlign = right ? "right" : "left";
    halo(context, "leak", right ? xs[0] - 7 : xs[xs.length - 1] + 7, 7, pane);
    context.textAlign = "left";
  }

  private drawMap(view: View, ink: string): void {
    const pane = this.map;
    const context = pane.begin([view.state.from, view.state.to]);
    const { state, drawing, facts } = view;
    const high = state.high || (drawing?.highest ?? 1);
    const y = (bytes: number) => pane.floor * (1 - (bytes - state.low) / (high - state.low));
    context.fillStyle = ink;
    context.strokeStyle = ink;
    if (state.layout === "address") {
      context.globalAlpha = 0.35;
      for (const [, offset, length] of facts.regions) {
        const at = Math.round(y(offset)) + 0.5;
        if (at < 0 || at > pane.floor) continue;
        line(context, pane.left, at, pane.width, at);
        const room = y(offset) - y(offset + length);
        context.globalAlpha = 0.8;
        if (room > 26)
          halo(context, `a segment of ${sizeText(length)}`, pane.left + 4, at - 9, pane);
        context.globalAlpha = 0.35;
      }
      context.globalAlpha = 1;
    } else {
      for (const lane of drawing?.lanes ?? []) {
        const at = Math.round(y(lane.bottom)) + 0.5;
        if (at < -20 || y(lane.bottom + lane.height) > pane.floor) continue;
        context.globalAlpha = 0.35;
        line(context, 0, at, pane.width, at);
        context.globalAlpha = 1;
        const room = y(lane.bottom) - y(lane.bottom + lane.height);
        if (room > 11)
          label(context, lane.name, 2, at - Math.min(room / 2, 8), pane.left - 4, true);
      }
    }
    if (view.bar) this.outline(context, view, y, ink);
    if (view.drawing?.exact === false) {
      context.fillStyle = ink;
      halo(context, "coarse while it moves", pane.left + 6, 10, pane);
    }
    this.marks(context, view, pane, ink, false);
  }

  private outline(
    context: CanvasRenderingContext2D,
    view: View,
    y: (bytes: number) => number,
    ink: string,
  ): void {
    const { bar, state } = view;
    if (!bar) return;
    const pane = this.map;
    const left = Math.max(pane.xOf(share(state, bar.left)), pane.left);
    const right = Math.min(pane.xOf(share(state, bar.right)), pane.width);
    const bottom = y(bar.low);
    const upper = Math.min(y(bar.high), bottom - 3);
    context.lineWidth = 2;
    context.strokeStyle = ink;
    if (right >= left) context.strokeRect(left, upper, Math.max(right - left, 3), bottom - upper);
    context.lineWidth = 1;
  }

  private marks(
    context: CanvasRenderingContext2D,
    view: View,
    pane: Pane,
    ink: string,
    words: boolean,
  ): void {
    const { state, facts, places } = view;
    const at = (x: number) => pane.xOf(share(state, x));
    const inside = (x: number) => x >= pane.left - 1 && x <= pane.width + 1;
    if (view.beginX !== null) {
      const left = Math.max(at(Math.min(view.beginX, view.cursorX)), pane.left);
      const right = Math.min(at(Math.max(view.beginX, view.cursorX)), pane.width);
      context.fillStyle = ink;
      context.globalAlpha = 0.12;
      if (right > left) context.fillRect(left, 0, right - left, pane.floor);
      context.globalAlpha = 1;
    }
    facts.failures.forEach((failure, i) => {
      const x = at(state.axis === "time" ? failure.time_ns : places.failures[i]);
      if (!inside(x)) return;
      // Memory runs out at the end of a trace: the mark is left of the edge, and so are its words.
      const mark = Math.min(x, pane.width - 2);
      vertical(context, mark, pane.floor, FAILED, []);
      context.fillStyle = FAILED;
      const right = mark > pane.width - 180;
      context.textAlign = right ? "right" : "left";
      const text = `out of memory: ${sizeText(failure.bytes)}`;
      if (words) halo(context, text, mark + (right ? -4 : 4), 8, pane);
      context.textAlign = "left";
    });
    const peak = at(view.peakX);
    if (inside(peak)) {
      vertical(context, peak, pane.floor, ink, [3, 2]);
      context.fillStyle = ink;
      const right = peak > pane.width - 110;
      context.textAlign = right ? "right" : "left";
      if (words)
        halo(context, `peak ${sizeText(facts.peak.bytes)}`, peak + (right ? -4 : 4), 20, pane);
      context.textAlign = "left";
    }
    if (inside(at(view.cursorX))) vertical(context, at(view.cursorX), pane.floor, ink, []);
    if (view.hoverX !== null && inside(at(view.hoverX))) {
      context.globalAlpha = 0.5;
      vertical(context, at(view.hoverX), pane.floor, ink, [1, 2]);
      context.globalAlpha = 1;
    }
    timeAxis(context, pane, view, ink);
  }
}

export function share(state: State, x: number): number {
  return (x - state.from) / (state.to - state.from);
}

function line(context: CanvasRenderingContext2D, x0: number, y0: number, x1: number, y1: number) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function vertical(
  context: CanvasRenderingContext2D,
  x: number,
  height: number,
  color: string,
  dashes: number[],
): void {
  context.strokeStyle = color;
  context.setLineDash(dashes);
  line(context, Math.round(x) + 0.5, 0, Math.round(x) + 0.5, height);
  context.setLineDash([]);
}

/** Words on a picture, readable whatever is behind them. */
function halo(
  context: CanvasRenderingContext2D,
  text: string,
  x: number,
  y: number,
  pane: Pane,
): void {
  context.strokeStyle = getComputedStyle(pane.canvas).getPropertyValue("--ground");
  context.lineWidth = 3;
  context.lineJoin = "round";
  context.strokeText(text, x, y);
  context.lineWidth = 1;
  context.strokeStyle = context.fillStyle;
  context.fillText(text, x, y);
}

function bytesAxis(
  context: CanvasRenderingContext2D,
  pane: Pane,
  low: number,
  high: number,
  ink: string,
): void {
  context.fillStyle = ink;
  context.strokeStyle = ink;
  context.textAlign = "right";
  for (const at of ticks(low, high, 4, true)) {
    const y = pane.floor * (1 - (at - low) / (high - low));
    context.globalAlpha = 0.18;
    line(context, pane.left, Math.round(y) + 0.5, pane.width, Math.round(y) + 0.5);
    context.globalAlpha = 1;
    if (y > 6) context.fillText(sizeText(at), pane.left - 6, Math.min(y, pane.floor - 6));
  }
  context.textAlign = "left";
}

function timeAxis(context: CanvasRenderingContext2D, pane: Pane, view: View, ink: string): void {
  const { state } = view;
  context.fillStyle = context.strokeStyle = ink;
  context.textAlign = "center";
  context.globalAlpha = 0.35;
  line(context, pane.left, Math.round(pane.floor) + 0.5, pane.width, Math.round(pane.floor) + 0.5);
  context.globalAlpha = 1;
  const places = ticks(state.from, state.to, Math.max(pane.width / 140, 2));
  const step = places.length > 1 ? places[1] - places[0] : state.to - state.from;
  const text = (at: number) =>
    state.axis === "time" ? tickText(at, step) : countText(Math.round(at) || 0); // no "-0"
  for (const at of places) {
    const x = pane.xOf(share(state, at));
    if (x < pane.left + 20 || x > pane.width - 24) continue;
    context.globalAlpha = 0.5;
    line(context, Math.round(x) + 0.5, pane.floor, Math.round(x) + 0.5, pane.floor + 4);
    context.globalAlpha = 1;
    context.fillText(text(at), x, pane.floor + 11);
  }
  context.textAlign = "left";
}
