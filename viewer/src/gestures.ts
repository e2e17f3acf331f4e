// Mouse, fingers, wheel and keys. The wheel alone scrolls the page; with Ctrl it zooms.

import * as actions from "./actions";
import type { App } from "./app";
import { inShort } from "./details";
import type { Bar } from "./engine";
import { sizeText, timeText } from "./format";
import type { Pane } from "./pane";
import { fromHash, toHash } from "./state";

type Where = "area" | "map";

export function listen(app: App): void {
  const mouse = new Mouse(app);
  document.addEventListener("keydown", (event) => key(app, event));
  app.frame.tabs.addEventListener("keydown", (event) => tabKey(app, event));
  listenToWindow(app);
  mouse.listen();
  explainWords(app);
}

function listenToWindow(app: App): void {
  window.addEventListener("hashchange", () => {
    const state = fromHash(location.hash, app.usual);
    if (toHash(state, app.usual) === toHash(app.state, app.usual)) return;
    app.history.keep(app.state);
    app.state = app.doc.sets[state.set] ? state : { ...state, set: 0 };
    app.applyTheme();
    app.openSet(true);
  });
  let first = true; // it tells of the size that is known already
  const resized = new ResizeObserver(() => {
    if (first) {
      first = false;
      return;
    }
    app.drawStrip().then(() => app.draw());
    app.frame.who.icicle.draw();
  });
  for (const pane of app.charts.all) resized.observe(pane.canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.refresh());
  window.addEventListener("beforeprint", () => {
    document.documentElement.dataset.theme = "light"; // paper is white
    app.paint();
    app.frame.who.icicle.draw();
  });
  window.addEventListener("afterprint", () => {
    app.applyTheme();
    app.paint();
  });
}

/** A word says what it means under the mouse, when it has the focus, and when it is touched. */
function explainWords(app: App): void {
  const meaning = (event: Event) =>
    (event.target as HTMLElement).closest?.<HTMLElement>("[data-meaning]");
  const tell = (event: Event) => {
    const word = meaning(event);
    if (!word) return;
    const box = word.getBoundingClientRect();
    app.frame.showTip(word.dataset.meaning ?? "", {
      clientX: box.left - 14,
      clientY: box.bottom - 8,
    });
  };
  for (const name of ["pointerover", "focusin", "click"]) document.addEventListener(name, tell);
  for (const name of ["pointerout", "focusout"]) {
    document.addEventListener(name, (event) => meaning(event) && app.frame.showTip("", null));
  }
}

class Mouse {
  private wheeled = 0; // when the wheel last turned
  private readonly fingers = new Map<number, { x: number; y: number }>();

  constructor(private readonly app: App) {}

  listen(): void {
    const { strip, area, map, bands } = this.app.charts;
    for (const pane of [area, map, bands]) {
      const { canvas } = pane;
      canvas.addEventListener("wheel", (event) => this.wheel(event, pane), { passive: false });
      canvas.addEventListener("dblclick", () => actions.fit(this.app));
    }
    this.dragged(area, "area");
    this.dragged(bands, "area");
    this.dragged(map, "map");
    strip.canvas.addEventListener("pointerdown", (event) => this.brush(event));
    area.canvas.addEventListener("pointermove", (event) => this.hoverArea(event));
    map.canvas.addEventListener("pointermove", (event) => this.hoverMap(event));
    for (const pane of [area, map]) {
      pane.canvas.addEventListener("pointerleave", () => {
        this.app.hover = null;
        this.app.frame.showTip("", null);
        this.app.paint();
      });
    }
  }

  private dragged(pane: Pane, where: Where): void {
    const { canvas } = pane;
    canvas.addEventListener("pointerdown", (event) => {
      this.fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
      if (this.fingers.size === 1) this.drag(event, where);
      else if (this.fingers.size === 2) this.app.history.keep(this.app.state);
    });
    canvas.addEventListener("pointermove", (event) => this.pinch(event, pane));
    for (const name of ["pointerup", "pointercancel"] as const) {
      window.addEventListener(name, (event) => this.fingers.delete(event.pointerId));
    }
  }

  /** Two fingers: what is between them stays there. */
  private pinch(event: PointerEvent, pane: Pane): void {
    const before = this.fingers.get(event.pointerId);
    if (!before || this.fingers.size !== 2) return;
    const [other] = [...this.fingers].flatMap(([id, at]) => (id === event.pointerId ? [] : [at]));
    const apart = (x: number) => Math.max(Math.abs(x - other.x), 20);
    const middle = pane.shareOf({ clientX: (event.clientX + other.x) / 2 });
    actions.zoom(this.app, apart(before.x) / apart(event.clientX), middle, false);
    this.fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
  }

  /** The page scrolls as everywhere; with Ctrl the wheel zooms, and sideways it moves. */
  private wheel(event: WheelEvent, pane: Pane): void {
    const { app } = this;
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!sideways && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    if (event.timeStamp - this.wheeled > 600) app.history.keep(app.state);
    this.wheeled = event.timeStamp;
    if (sideways) actions.pan(app, (event.deltaX || event.deltaY) / 1000, false);
    else actions.zoom(app, 1.0016 ** event.deltaY, pane.shareOf(event), false);
  }

  /** Dragging moves; with Shift it is a box that is looked into; without moving it is a click. */
  private drag(event: PointerEvent, where: Where): void {
    if (event.button !== 0) return;
    const { app } = this;
    const pane = app.charts[where];
    const { from, to, low } = app.state;
    const high = app.state.high || (app.drawing?.highest ?? 1);
    const begin = { x: pane.shareOf(event), y: pane.heightOf(event) };
    app.history.keep(app.state);
    let moved = false;
    const move = (e: PointerEvent) => {
      if (this.fingers.size > 1) {
        moved = true;
        return;
      }
      const x = pane.shareOf(e);
      moved ||= Math.abs(e.clientX - event.clientX) + Math.abs(e.clientY - event.clientY) > 4;
      if (!moved || event.shiftKey) return;
      const by = (begin.x - x) * (to - from);
      const up = app.state.high ? (begin.y - pane.heightOf(e)) * (high - low) : 0;
      const vertical = where === "map" && app.state.high ? { low: low + up, high: high + up } : {};
      app.change({ from: from + by, to: to + by, ...vertical }, false);
    };
    const end = (e: PointerEvent) => {
      for (const name of ["pointerup", "pointercancel"] as const) {
        window.removeEventListener(name, end);
      }
      window.removeEventListener("pointermove", move);
      if (e.type === "pointercancel") return; // the finger scrolls the page
      if (!moved) this.click(e, where);
      else if (event.shiftKey) {
        const xs = [begin.x, pane.shareOf(e)].sort((a, b) => a - b);
        const ys = [begin.y, pane.heightOf(e)].sort((a, b) => a - b);
        const box = { from: from + xs[0] * (to - from), to: from + xs[1] * (to - from) };
        const vertical = { low: low + ys[0] * (high - low), high: low + ys[1] * (high - low) };
        app.change(where === "map" && ys[1] - ys[0] > 0.02 ? { ...box, ...vertical } : box, false);
      }
    };
    window.addEventListener("pointermove", move);
    for (const name of ["pointerup", "pointercancel"] as const) window.addEventListener(name, end);
  }

  private async click(event: PointerEvent, where: Where): Promise<void> {
    const { app } = this;
    const { set, axis } = app.state;
    const at = await app.channel.ask("moment", { set, axis, x: this.xAt(event, where) });
    const bar = where === "map" ? await this.barUnder(event) : null;
    app.bar = bar ?? app.bar;
    app.change({ cursor: at.change, ...(bar ? { pinned: bar.allocation } : {}) }, false);
  }

  private brush(event: PointerEvent): void {
    const { app } = this;
    const pane = app.charts.strip;
    const [first, last] = app.bounds;
    const begin = pane.shareOf(event);
    app.history.keep(app.state);
    const show = (e: PointerEvent) => {
      const [left, right] = [begin, pane.shareOf(e)].sort((a, b) => a - b);
      const half = right - left < 0.005 ? (app.state.to - app.state.from) / (last - first) / 2 : 0;
      const at = (share: number) => first + share * (last - first);
      app.change({ from: at(left - half), to: at(right + half) }, false);
    };
    const end = (e: PointerEvent) => {
      if (e.type === "pointerup") show(e);
      window.removeEventListener("pointermove", show);
      window.removeEventListener("pointerup", end);
      window.removeEventListener("pointercancel", end);
    };
    window.addEventListener("pointermove", show);
    window.addEventListener("pointerup", end);
    window.addEventListener("pointercancel", end);
  }

  private xAt(event: { clientX: number }, where: Where): number {
    const { from, to } = this.app.state;
    return from + this.app.charts[where].shareOf(event) * (to - from);
  }

  private async hoverArea(event: PointerEvent): Promise<void> {
    const { app } = this;
    const { set, axis } = app.state;
    const x = this.xAt(event, "area");
    app.hover = x;
    const at = await app.channel.ask("moment", { set, axis, x });
    if (app.hover !== x) return;
    const parts = app.doc.categories
      .map((name, i): [string, number] => [name, at.levels[i]])
      .filter(([, bytes]) => bytes > 0)
      .map(([name, bytes]) => `${name} ${sizeText(bytes)}`);
    const text = `${timeText(at.time_ns)}: ${sizeText(at.bytes)}\n${parts.join("\n")}`;
    app.frame.showTip(text, event);
    app.paint();
  }

  private async hoverMap(event: PointerEvent): Promise<void> {
    const { app } = this;
    const x = this.xAt(event, "map");
    const began = performance.now();
    app.hover = x;
    const bar = await this.barUnder(event);
    performance.measure("hover", { start: began, end: performance.now() });
    if (app.hover !== x) return;
    app.frame.showTip(bar ? inShort(bar) : "", event);
    app.paint();
  }

  private barUnder(event: PointerEvent): Promise<Bar | null> {
    const { app } = this;
    const pane = app.charts.map;
    const { from, to } = app.state;
    const high = app.state.high || (app.drawing?.highest ?? 1);
    const low = app.state.high ? app.state.low : 0;
    return app.channel.ask("hit", {
      ...app.look,
      from,
      to,
      x: this.xAt(event, "map"),
      bytes: low + pane.heightOf(event) * (high - low),
      reachX: (0.5 * (to - from)) / pane.pictureWidth,
      reachBytes: high / pane.pictureHeight,
    });
  }
}

function tabKey(app: App, event: KeyboardEvent): void {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  event.stopPropagation();
  event.preventDefault();
  const tabs = [...app.frame.tabs.querySelectorAll<HTMLElement>("[role=tab]")];
  const now = tabs.findIndex((each) => each.dataset.tab === app.state.tab);
  const next = tabs[(now + by + tabs.length) % tabs.length];
  next.click();
  next.focus();
}

function key(app: App, event: KeyboardEvent): void {
  const target = event.target as HTMLElement;
  const { input, help } = app.frame;
  if (help.open) return;
  if (target === input && event.key === "Enter") input.blur();
  if (target === input && event.key === "Escape") {
    input.blur();
    actions.endSearch(app);
  }
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || event.ctrlKey || event.metaKey) return;
  const on: Record<string, () => void> = {
    w: () => actions.zoom(app, 0.7, actions.cursorShare(app)),
    s: () => actions.zoom(app, 1 / 0.7, actions.cursorShare(app)),
    a: () => actions.pan(app, -0.2),
    d: () => actions.pan(app, 0.2),
    p: () => actions.toPeak(app),
    f: () => actions.fit(app),
    r: () => actions.toggleRange(app),
    "[": () => actions.nextStep(app, -1),
    "]": () => actions.nextStep(app, 1),
    "/": () => {
      input.focus();
      input.select(); // what is typed next replaces the old search
    },
    "?": () => help.showModal(),
    ArrowLeft: () => actions.stepCursor(app, -1),
    ArrowRight: () => actions.stepCursor(app, 1),
    Backspace: () => app.undo(),
    Escape: () => (app.state.search ? actions.endSearch(app) : actions.unpin(app)),
  };
  const action = on[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!action) return;
  event.preventDefault();
  action();
}
