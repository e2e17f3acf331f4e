"use strict";
(() => {
  // src/format.ts
  function sizeText(amount) {
    if (amount < 0) return `-${sizeText(-amount)}`;
    if (amount < 1e3) return `${Math.round(amount)} B`;
    const units = ["KiB", "MiB", "GiB", "TiB"];
    let power = 1;
    while (amount / 1024 ** power >= 999.5 && power < units.length) power++;
    return `${threeDigits(amount / 1024 ** power)} ${units[power - 1]}`;
  }
  var signed = (amount) => amount > 0 ? `+${sizeText(amount)}` : sizeText(amount);
  function timeText(ns) {
    if (ns < 0) return `-${timeText(-ns)}`;
    for (const [unit, size2] of [
      ["s", 1e9],
      ["ms", 1e6],
      ["us", 1e3]
    ]) {
      if (ns / size2 >= 0.9995) return `${threeDigits(ns / size2)} ${unit}`;
    }
    return `${Math.round(ns)} ns`;
  }
  function threeDigits(value) {
    return value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
  }
  var countText = (count) => count.toLocaleString("en");
  var exactText = (bytes) => `${countText(bytes)} bytes`;
  var shareText = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)}%` : "";
  var codeParts = (text) => text.split(/`([^`]+)`/).map((part, i) => [part, i % 2 === 1]);
  function ticks(from, to, about, binary = false) {
    const rough = (to - from) / about;
    if (!(rough > 0)) return [];
    const base = binary ? 2 : 10;
    const power = base ** Math.floor(Math.log(rough) / Math.log(base));
    const factors = binary ? [1, 2] : [1, 2, 5, 10];
    const step = power * (factors.find((factor) => factor * power >= rough) ?? base);
    const found = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
    return found;
  }

  // src/dom.ts
  function h(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === void 0 || value === false) continue;
      if (typeof value === "function") {
        element.addEventListener(name, value);
      } else if (value === true) element.setAttribute(name, "");
      else element.setAttribute(name, String(value));
    }
    for (const child of children) if (child) element.append(child);
    return element;
  }
  function fill(parent, ...children) {
    parent.replaceChildren(...children.filter((child) => !!child));
  }
  function prose(text) {
    const parts = codeParts(text).map(([part, isCode]) => isCode ? h("code", {}, part) : part);
    return h("span", {}, ...parts);
  }
  function choice(label2, options, chosen, change) {
    const select = h(
      "select",
      { change: () => change(select.value), name: label2 },
      ...options.map(([value, text]) => h("option", { value, selected: value === chosen }, text))
    );
    return h("label", { class: "choice" }, `${label2} `, select);
  }
  function swatch(color) {
    const element = h("span", { class: "swatch", "aria-hidden": "true" });
    element.style.background = color;
    return element;
  }
  function save(name, parts, type) {
    const address = URL.createObjectURL(new Blob(parts, { type }));
    h("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1e4);
  }

  // src/books.ts
  function table(caption, heads, rows, total) {
    const cell = (inside) => h("td", { class: typeof inside === "string" && /^[a-z.(]/i.test(inside) && "words" }, inside);
    const line2 = ([first, ...others]) => h("tr", {}, h("th", { scope: "row" }, first), ...others.map(cell));
    return h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      h(
        "table",
        {},
        h("caption", {}, caption),
        h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col" }, head)))),
        h("tbody", {}, ...rows.map(line2)),
        total ? h("tfoot", {}, line2(total)) : null
      )
    );
  }
  function size(bytes) {
    if (bytes === null) return h("span", {}, "not known");
    return h("span", { title: exactText(bytes), "data-bytes": bytes }, sizeText(bytes));
  }
  function steps(facts, actions) {
    if (facts.steps.length === 0) return h("p", {}, "No training step was seen.");
    const time = (device, host) => timeText(device ?? host);
    const rows = facts.steps.map((row, i) => [
      h("button", { click: () => actions.go(i) }, `step ${facts.first_step + row.step}`),
      i > 0 ? h(
        "button",
        {
          click: () => actions.compare(i),
          "aria-label": `what changed in step ${facts.first_step + row.step}`
        },
        "what changed"
      ) : "",
      size(row.peak_bytes),
      h("span", { title: exactText(row.growth_bytes) }, signed(row.growth_bytes)),
      countText(row.allocations),
      time(row.device_forward_ns, row.forward_ns),
      time(row.device_backward_ns, row.backward_ns),
      time(row.device_optimizer_ns, row.optimizer_ns)
    ]);
    const heads = [
      "step",
      "compare",
      "peak",
      "growth",
      "allocations",
      "forward",
      "backward",
      "optimizer"
    ];
    return table("Steps", heads, rows);
  }
  function ledger(found) {
    const whole = Math.max(...found.rows.map((row) => row.bytes ?? 0), 1);
    const reached = [0];
    const rows = found.rows.map((row) => {
      const begin = reached[row.level] ?? reached[row.level - 1] ?? 0;
      const bytes = row.bytes ?? 0;
      reached[row.level] = begin + bytes;
      reached.length = row.level + 1;
      reached[row.level + 1] = begin;
      const bar = h("span", { class: "bar", "aria-hidden": "true" });
      bar.style.marginLeft = `${100 * begin / whole}%`;
      bar.style.width = `${100 * Math.max(bytes, 0) / whole}%`;
      const name = h("span", {}, row.name);
      name.style.paddingLeft = `${row.level}em`;
      const how = row.moment === found.at ? row.known_by : `${row.known_by}, ${row.moment}`;
      return [name, size(row.bytes), h("span", { class: "waterfall" }, bar), how];
    });
    const end = found.residual === null ? "There is no figure to close with." : residual(found);
    return h(
      "div",
      {},
      table(`Ledger at the ${found.at}`, ["what", "bytes", "picture", "known by"], rows),
      h("p", {}, prose([end, ...found.notes].join(" ")))
    );
  }
  function residual(found) {
    const bytes = found.residual ?? 0;
    const within = found.limit !== null && Math.abs(bytes) <= found.limit ? "within" : "more than";
    return `Residual ${exactText(bytes)}, ${within} ${sizeText(found.limit ?? 0)}.`;
  }
  function parameters(facts) {
    if (!facts.per_parameter || !facts.parameters) return null;
    const figure = (value) => value === null ? "" : value.toFixed(2);
    const rows = facts.per_parameter.map((row) => [
      row.category,
      size(row.bytes),
      figure(row.per_parameter),
      figure(row.at_peak),
      figure(row.at_rest),
      row.textbook
    ]);
    const heads = ["category", "most", "per parameter", "at the peak", "at rest", "textbook"];
    return table(`Bytes per parameter, of ${countText(facts.parameters)}`, heads, rows);
  }
  function findings(facts, show) {
    const found = facts.findings ?? [];
    const parts = found.map(
      (row) => h(
        "li",
        {},
        h("b", { title: exactText(row.bytes) }, `${row.kind}: `),
        prose(`${row.evidence}. ${sentence(row.change)} `),
        row.line || row.module ? h(
          "button",
          { click: () => show(row.line, row.module) },
          `show all bars of this ${row.line ? "line" : "module"}`
        ) : null
      )
    );
    if (found.length === 0) parts.push(h("li", {}, "No leak and no waste was found."));
    if (facts.hint && !found.some((row) => asHint(row) === facts.hint)) {
      parts.push(h("li", {}, h("b", {}, "hint: "), prose(facts.hint)));
    }
    return h("div", {}, h("h2", {}, "What to change"), h("ul", { class: "findings" }, ...parts));
  }
  var asHint = (row) => `${row.evidence}: ${row.change}.`;
  function firstAdvice(facts) {
    if (facts.hint) return { kind: "hint", text: facts.hint };
    const [first] = facts.findings ?? [];
    return first ? { kind: first.kind, text: asHint(first) } : null;
  }
  var sentence = (text) => text ? `${text[0].toUpperCase()}${text.slice(1)}.` : "";
  function health(facts) {
    if (facts.health.length === 0) return null;
    const rows = facts.health.map((row) => [
      row.name,
      row.severity,
      countText(row.count),
      `${row.meaning}. ${row.advice}`
    ]);
    return table(
      "What was lost or could not be seen",
      ["what", "severity", "count", "meaning"],
      rows
    );
  }
  function costs(facts) {
    if (facts.costs.length === 0) return null;
    const row = (cost) => [
      cost.name || "no module",
      timeText(cost.time_ns),
      shareText(cost.time_share, 1),
      timeText(cost.forward_ns),
      timeText(cost.backward_ns),
      cost.time_ratio === null ? "" : cost.time_ratio.toFixed(2),
      cost.expected_ratio === null ? "" : cost.expected_ratio.toFixed(2),
      cost.verdict
    ];
    const heads = ["module", "time", "share", "forward", "backward", "ratio", "expected", "verdict"];
    return table("What modules cost", heads, facts.costs.map(row));
  }
  function isMostlyIdle({ idle_ns, begin_ns, end_ns }) {
    return 2 * idle_ns > end_ns - begin_ns;
  }
  function notes(facts) {
    const found = [];
    if (isMostlyIdle(facts)) {
      const whole = timeText(facts.end_ns - facts.begin_ns);
      found.push(
        `Nothing was allocated or freed in ${timeText(facts.idle_ns)} of ${whole}, so the pictures go by events. "across: time" shows the clock.`
      );
    }
    if (facts.rest) {
      found.push(
        `${countText(facts.rest.count)} of ${countText(facts.allocations)} allocations cover least of the picture and are not drawn. They are in every sum; between the moments Python wrote down, sums are those of the moment before. The peak and the end are exact.`
      );
    }
    if (facts.modules.length >= facts.most_bands) {
      found.push(`Of the modules' calls the ${countText(facts.most_bands)} longest are drawn.`);
    }
    if (facts.phases.length >= facts.most_bands) {
      found.push(`Of the phases the first ${countText(facts.most_bands)} are drawn.`);
    }
    return found;
  }

  // src/pane.ts
  var Pane = class {
    constructor(name, label2, left) {
      this.name = name;
      this.left = left;
      this.canvas = document.createElement("canvas");
      this.canvas.className = `pane ${name}`;
      this.canvas.setAttribute("role", "img");
      this.canvas.setAttribute("aria-label", label2);
      const context = this.canvas.getContext("2d");
      if (!context) throw new Error("this browser has no canvas");
      this.context = context;
    }
    name;
    left;
    canvas;
    context;
    kept = document.createElement("canvas");
    seen = [0, 1];
    width = 0;
    // CSS pixels
    height = 0;
    scale = 1;
    /** As large as the page lays it out; what was drawn stays until there is better. */
    measure() {
      const box = this.canvas.getBoundingClientRect();
      this.scale = Math.min(window.devicePixelRatio || 1, 2);
      this.width = Math.max(box.width, this.left + 20);
      this.height = Math.max(box.height, 8);
      const width = Math.round(this.width * this.scale);
      const height = Math.round(this.height * this.scale);
      if (this.canvas.width !== width || this.canvas.height !== height) {
        this.canvas.width = width;
        this.canvas.height = height;
      }
    }
    /** Pixels of the picture, without the words' margin. */
    get pictureWidth() {
      return Math.max(Math.round((this.width - this.left) * this.scale), 1);
    }
    get pictureHeight() {
      return Math.max(Math.round(this.height * this.scale), 1);
    }
    /** The picture of what is seen from one place on the axis to another. */
    put(pixels, width, height, seen) {
      this.seen = seen;
      this.kept.width = width;
      this.kept.height = height;
      const bytes = new Uint8ClampedArray(pixels.buffer);
      this.kept.getContext("2d")?.putImageData(new ImageData(bytes, width, height), 0, 0);
    }
    /** Begins anew with the picture, moved to where it belongs until there is a better one. */
    begin([from, to] = this.seen) {
      const { context, canvas } = this;
      context.setTransform(1, 0, 0, 1, 0, 0);
      context.clearRect(0, 0, canvas.width, canvas.height);
      if (this.kept.width > 0 && this.kept.height > 0) {
        const left = Math.round(this.left * this.scale);
        const perX = (canvas.width - left) / (to - from);
        const begin = left + (this.seen[0] - from) * perX;
        const width = (this.seen[1] - this.seen[0]) * perX;
        context.imageSmoothingEnabled = false;
        context.drawImage(this.kept, begin, 0, width, canvas.height);
        context.clearRect(0, 0, left, canvas.height);
      }
      context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
      context.font = "11px system-ui, sans-serif";
      context.textBaseline = "middle";
      return context;
    }
    /** Where a place between 0 and 1 is. */
    xOf(share2) {
      return this.left + share2 * (this.width - this.left);
    }
    shareOf(event) {
      const box = this.canvas.getBoundingClientRect();
      const share2 = (event.clientX - box.left - this.left) / Math.max(box.width - this.left, 1);
      return Math.max(0, Math.min(1, share2));
    }
    /** 0 at the lower edge, 1 at the upper one. */
    heightOf(event) {
      const box = this.canvas.getBoundingClientRect();
      return Math.max(0, Math.min(1, 1 - (event.clientY - box.top) / Math.max(box.height, 1)));
    }
  };
  function label(context, text, x, y, room) {
    if (room < 14) return;
    let shown = text;
    if (context.measureText(shown).width > room) {
      const letters = Math.floor(room / context.measureText(shown).width * shown.length) - 1;
      if (letters < 2) return;
      shown = `${shown.slice(0, letters)}\u2026`;
    }
    context.fillText(shown, x, y);
  }

  // src/charts.ts
  var PHASE_COLORS = ["#8899aa", "#999933", "#4477aa", "#44aaaa", "#aa4499", "#ddaa33"];
  var MODULE_COLORS = ["#5577aa", "#557799", "#55aa99", "#779955", "#997755", "#995577"];
  var FAILED = "#dd4433";
  var Charts = class {
    strip;
    bands;
    area;
    map;
    constructor(left) {
      this.strip = new Pane("strip", "Overview: all memory over the whole trace", left);
      this.bands = new Pane("bands", "Steps, phases and modules over time", left);
      this.area = new Pane("area", "Memory over time, by category", left);
      this.map = new Pane("map", "Every allocation as a bar", left);
    }
    get all() {
      return [this.strip, this.bands, this.area, this.map];
    }
    measure() {
      for (const pane of this.all) pane.measure();
    }
    draw(view) {
      const ink = getComputedStyle(this.area.canvas).color;
      this.drawStrip(view, ink);
      this.drawBands(view, ink);
      this.drawArea(view, ink);
      this.drawMap(view, ink);
    }
    drawStrip(view, ink) {
      const pane = this.strip;
      const context = pane.begin();
      const [from, to] = view.bounds;
      const x = (at) => pane.xOf((at - from) / (to - from));
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
    drawBands(view, ink) {
      const pane = this.bands;
      const context = pane.begin();
      const { facts, places, state } = view;
      const byTime = state.axis === "time";
      const span = (i, begin, end, exact) => byTime ? [begin, end] : exact[i];
      const band = (range, top, high, color, text) => {
        const left = Math.max(pane.xOf(share(state, range[0])), pane.left);
        const right = Math.min(pane.xOf(share(state, range[1])), pane.width);
        if (right <= pane.left || left >= pane.width || right - left < 0.3) return;
        context.fillStyle = color;
        context.fillRect(left, top, Math.max(right - left - 0.5, 0.5), high - 1);
        context.fillStyle = "#fff";
        label(context, text, left + 3, top + high / 2, right - left - 6);
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
        band(range, 28 + depth * 12, 12, color, view.document.strings[name]);
      });
      context.fillStyle = ink;
      context.textAlign = "right";
      ["step", "phase", "module"].forEach((text, i) => {
        context.fillText(text, pane.left - 6, [8, 22, 36][i]);
      });
      context.textAlign = "left";
    }
    drawArea(view, ink) {
      const pane = this.area;
      const context = pane.begin([view.state.from, view.state.to]);
      const top = view.drawing?.top ?? 1;
      const y = (bytes) => pane.height * (1 - bytes / top);
      bytesAxis(context, pane, 0, top, ink);
      this.lines(context, view, y, ink);
      this.marks(context, view, pane, ink, true);
    }
    /** What the allocator holds, and what everybody holds on the device. */
    lines(context, view, y, ink) {
      const { facts, places, state } = view;
      const pane = this.area;
      context.save();
      context.beginPath();
      context.rect(pane.left, 0, pane.width - pane.left, pane.height);
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
      facts.device_use.forEach((use, i) => {
        const x = pane.xOf(share(state, state.axis === "time" ? use.time_ns : places.use[i]));
        context.strokeStyle = ink;
        context.strokeRect(x - 3, y(use.bytes) - 3, 6, 6);
      });
      context.restore();
    }
    drawMap(view, ink) {
      const pane = this.map;
      const context = pane.begin([view.state.from, view.state.to]);
      const { state, drawing, facts } = view;
      const high = state.high || (drawing?.highest ?? 1);
      const y = (bytes) => pane.height * (1 - (bytes - state.low) / (high - state.low));
      context.fillStyle = ink;
      context.strokeStyle = ink;
      if (state.layout === "address") {
        context.globalAlpha = 0.35;
        for (const [, offset, length] of facts.regions) {
          const at = Math.round(y(offset)) + 0.5;
          if (at < 0 || at > pane.height) continue;
          line(context, pane.left, at, pane.width, at);
          const room = y(offset) - y(offset + length);
          if (room > 26) context.fillText(sizeText(length), 4, at - 8);
        }
        context.globalAlpha = 1;
      } else {
        for (const lane of drawing?.lanes ?? []) {
          const at = Math.round(y(lane.bottom)) + 0.5;
          if (at < -20 || y(lane.bottom + lane.height) > pane.height) continue;
          context.globalAlpha = 0.35;
          line(context, 0, at, pane.width, at);
          context.globalAlpha = 1;
          const room = y(lane.bottom) - y(lane.bottom + lane.height);
          if (room > 11) label(context, lane.name, 2, at - Math.min(room / 2, 8), pane.left - 4);
        }
      }
      if (view.bar) this.outline(context, view, y, ink);
      this.marks(context, view, pane, ink, false);
    }
    outline(context, view, y, ink) {
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
    marks(context, view, pane, ink, words) {
      const { state, facts, places } = view;
      const at = (x) => pane.xOf(share(state, x));
      const inside = (x) => x >= pane.left - 1 && x <= pane.width + 1;
      if (view.beginX !== null) {
        const left = Math.max(at(Math.min(view.beginX, view.cursorX)), pane.left);
        const right = Math.min(at(Math.max(view.beginX, view.cursorX)), pane.width);
        context.fillStyle = ink;
        context.globalAlpha = 0.12;
        if (right > left) context.fillRect(left, 0, right - left, pane.height);
        context.globalAlpha = 1;
      }
      facts.failures.forEach((failure, i) => {
        const x = at(state.axis === "time" ? failure.time_ns : places.failures[i]);
        if (!inside(x)) return;
        vertical(context, x, pane.height, FAILED, []);
        context.fillStyle = FAILED;
        if (words) halo(context, `out of memory: ${sizeText(failure.bytes)}`, x + 4, 8, pane);
      });
      const peak = at(view.peakX);
      if (inside(peak)) {
        vertical(context, peak, pane.height, ink, [3, 2]);
        context.fillStyle = ink;
        const right = peak > pane.width - 110;
        context.textAlign = right ? "right" : "left";
        if (words)
          context.fillText(`peak ${sizeText(facts.peak.bytes)}`, peak + (right ? -4 : 4), 20);
        context.textAlign = "left";
      }
      if (inside(at(view.cursorX))) vertical(context, at(view.cursorX), pane.height, ink, []);
      if (view.hoverX !== null && inside(at(view.hoverX))) {
        context.globalAlpha = 0.5;
        vertical(context, at(view.hoverX), pane.height, ink, [1, 2]);
        context.globalAlpha = 1;
      }
      if (words) timeAxis(context, pane, view, ink);
    }
  };
  function share(state, x) {
    return (x - state.from) / (state.to - state.from);
  }
  function line(context, x0, y0, x1, y1) {
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
  }
  function vertical(context, x, height, color, dashes) {
    context.strokeStyle = color;
    context.setLineDash(dashes);
    line(context, Math.round(x) + 0.5, 0, Math.round(x) + 0.5, height);
    context.setLineDash([]);
  }
  function halo(context, text, x, y, pane) {
    context.strokeStyle = getComputedStyle(pane.canvas).getPropertyValue("--ground");
    context.lineWidth = 3;
    context.lineJoin = "round";
    context.strokeText(text, x, y);
    context.lineWidth = 1;
    context.strokeStyle = context.fillStyle;
    context.fillText(text, x, y);
  }
  function bytesAxis(context, pane, low, high, ink) {
    context.fillStyle = ink;
    context.strokeStyle = ink;
    context.textAlign = "right";
    for (const at of ticks(low, high, 4, true)) {
      const y = pane.height * (1 - (at - low) / (high - low));
      context.globalAlpha = 0.18;
      line(context, pane.left, Math.round(y) + 0.5, pane.width, Math.round(y) + 0.5);
      context.globalAlpha = 1;
      if (y > 6) context.fillText(sizeText(at), pane.left - 6, Math.min(y, pane.height - 6));
    }
    context.textAlign = "left";
  }
  function timeAxis(context, pane, view, ink) {
    const { state } = view;
    context.fillStyle = ink;
    context.textAlign = "center";
    const text = (at) => state.axis === "time" ? timeText(at) : countText(Math.round(at));
    for (const at of ticks(state.from, state.to, Math.max(pane.width / 140, 2))) {
      const x = pane.xOf(share(state, at));
      if (x < pane.left + 20 || x > pane.width - 24) continue;
      halo(context, text(at), x, pane.height - 7, pane);
      line(context, x, pane.height - 2, x, pane.height);
    }
    context.textAlign = "left";
  }

  // src/colors.ts
  var COLOR_BY = ["category", "phase", "module", "op", "line", "size"];
  var MANY = ["#4477aa", "#ddaa33", "#5a9e4b", "#aa4499", "#44aaaa", "#cc6677", "#999933"];
  var MORE = ["#882255", "#66aadd", "#997700", "#8877cc"];
  var PALETTE = [...MANY, ...MORE];
  var OTHERS = "#8899aa";
  var SIZES = [
    "#3b4994",
    "#3f73a6",
    "#4199a9",
    "#53b99a",
    "#93cf7d",
    "#d9db5f",
    "#f2b447",
    "#e4713d"
  ];
  var PHASES = ["#8899aa", "#999933", "#4477aa", "#44aaaa", "#aa4499", "#ddaa33"];
  function abgr(color) {
    const rgb = Number.parseInt(color.slice(1), 16);
    return (4278190080 | (rgb & 255) << 16 | rgb & 65280 | rgb >> 16) >>> 0;
  }
  function faded(color, dark) {
    const ground = dark ? 36 : 238;
    let mixed = 4278190080;
    for (let shift = 0; shift < 24; shift += 8) {
      mixed |= Math.round((color >> shift & 255) * 0.14 + ground * 0.86) << shift;
    }
    return mixed >>> 0;
  }
  function coloring(data, by) {
    if (by === "category") return byCategory(data);
    if (by === "size") return bySize(data);
    if (by === "phase")
      return byText(data, "phase", (name) => PHASES[data.words.phases.indexOf(name)]);
    return byText(data, by, void 0);
  }
  function byCategory(data) {
    const { categories, colors } = data.words;
    const palette = categories.map((name) => abgr(colors[name]));
    const present = new Set(data.category);
    return {
      ofKind: Uint32Array.from(data.category, (c) => palette[c]),
      legend: categories.filter((_, i) => present.has(i)).map((name) => ({ name, color: colors[name] }))
    };
  }
  function bySize(data) {
    const palette = SIZES.map(abgr);
    const rank = (bytes) => Math.max(0, Math.min(SIZES.length - 1, Math.floor(Math.log2(Math.max(bytes, 1)) / 4) - 1));
    const names = ["256 B", "4 KiB", "64 KiB", "1 MiB", "16 MiB", "256 MiB", "4 GiB"];
    return {
      ofKind: Uint32Array.from(data.size, (bytes) => palette[rank(bytes)]),
      legend: SIZES.map((color, i) => ({
        name: i < names.length ? `below ${names[i]}` : "4 GiB and more",
        color
      }))
    };
  }
  function byText(data, key, fixed) {
    const texts = data.text(key);
    const held = /* @__PURE__ */ new Map();
    for (let i = 0; i < data.count; i++) {
      const kind = data.kind[i];
      const weight = data.alive(i, data.facts.peak_change) ? data.size[kind] : data.size[kind] * 1e-6;
      held.set(texts[kind], (held.get(texts[kind]) ?? 0) + weight);
    }
    const order = [...held].sort((a, b) => b[1] - a[1]).map(([text]) => text);
    const color = /* @__PURE__ */ new Map();
    for (const text of order) {
      const name = data.words.strings[text];
      const own = fixed ? fixed(name) : PALETTE[color.size];
      if (own && name) color.set(text, own);
      if (!fixed && color.size >= PALETTE.length) break;
    }
    const legend = [...color].map(([text, c]) => ({ name: data.words.strings[text], color: c }));
    if (order.length > color.size) legend.push({ name: "others", color: OTHERS });
    return {
      ofKind: Uint32Array.from(texts, (text) => abgr(color.get(text) ?? OTHERS)),
      legend
    };
  }

  // src/details.ts
  function oneLine(bar) {
    const { name, shape, dtype, module, op, line: line2, category } = bar.texts;
    const tensor = [name, [shape, dtype].filter(Boolean).join(" ")].filter(Boolean).join(" ");
    return [sizeText(bar.bytes), category, tensor, module, op, line2].filter(Boolean).join("  \xB7  ");
  }
  function details(bar, source, alike) {
    const t = bar.texts;
    const made = [
      t.made_op,
      t.made_module && `in ${t.made_module}`,
      t.made_line && `at ${t.made_line}`
    ];
    const cause = [t.op, t.module && `in ${t.module}`, t.line && `at ${t.line}`];
    const freed = [t.freed_op, t.freed_module && `in ${t.freed_module}`];
    const words = (parts) => parts.filter(Boolean).join(" ");
    const begin = bar.start_ns === null ? "before the trace" : `${timeText(bar.start_ns)}, ${t.phase}`;
    const end = bar.end_ns === null ? "alive at the end" : `${timeText(bar.end_ns)}, ${t.free_phase}`;
    const took = bar.end_ns !== null && bar.start_ns !== null ? bar.end_ns - bar.start_ns : null;
    const rows = [
      ["size", `${sizeText(bar.bytes)} (${exactText(bar.bytes)})`],
      ["block", bar.block < 0 ? "" : bar.block === bar.bytes ? "" : exactText(bar.block)],
      ["category", [t.category, t.role].filter(Boolean).join(", ")],
      ["tensor", [t.name, t.shape, t.dtype].filter(Boolean).join(" ")],
      ["made", words(made)],
      ["for forward", words(cause) === words(made) ? "" : words(cause)],
      ["from", begin],
      ["until", end],
      ["freed by", words(freed)],
      ["lived", took === null ? "" : timeText(took)],
      ["address", bar.address],
      ["where", t.place],
      ["thread", t.thread],
      ["at the peak", bar.atPeak ? "yes" : "no"],
      ["number", `${countText(bar.row)} in t.allocations()`]
    ];
    const list = h("dl", { class: "details" });
    for (const [name, text] of rows) if (text) list.append(h("dt", {}, name), h("dd", {}, text));
    const others = h(
      "button",
      { click: () => alike(bar) },
      `show the ${countText(bar.alike)} that are like it`
    );
    return h("div", {}, list, snippet(source[t.line] ?? source[t.made_line]), others);
  }
  function snippet(lines) {
    if (!lines) return null;
    const [first, texts] = lines;
    const text = texts.map((line2, i) => `${String(first + i).padStart(5)}  ${line2}`).join("\n");
    return h("pre", { class: "source" }, text);
  }

  // src/help.ts
  var KEYS = [
    ["W S", "zoom in and out at the cursor; so does the wheel at the mouse"],
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
    ["?", "this list"]
  ];
  function HELP(close) {
    const rows = KEYS.map(
      ([key, what]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, what))
    );
    return h(
      "div",
      {},
      h("h2", {}, "Keys"),
      h("table", {}, h("tbody", {}, ...rows)),
      h(
        "p",
        {},
        "A search has words and regular expressions; a bar has to pass each. ",
        "Examples: op:mm, line:train.py:12, ^module:h.0$. ",
        "The address of this page holds what is shown: a copy of it shows the same."
      ),
      h("button", { click: close }, "close")
    );
  }

  // src/icicle.ts
  var ROW = 20;
  var COLORS = [
    "#4477aa",
    "#5a9e4b",
    "#aa4499",
    "#997700",
    "#44aaaa",
    "#cc6677",
    "#999933",
    "#882255"
  ];
  var Icicle = class {
    pane;
    cells = [];
    tree = null;
    compares = false;
    constructor(name, label2, choose, tell) {
      this.pane = new Pane(name, label2, 0);
      const { canvas } = this.pane;
      canvas.addEventListener("click", (event) => {
        const cell = this.at(event);
        if (cell) choose(cell.path);
      });
      canvas.addEventListener("mousemove", (event) => {
        const cell = this.at(event);
        tell(cell ? this.text(cell) : "", event);
      });
      canvas.addEventListener("mouseleave", () => tell("", null));
    }
    show(tree, depth, compares = false) {
      this.tree = tree;
      this.compares = compares;
      this.pane.canvas.style.height = `${depth * ROW}px`;
      this.draw();
    }
    draw() {
      if (!this.tree) return;
      this.pane.measure();
      const context = this.pane.begin();
      this.cells = [];
      this.divide(this.tree, [], 0, this.pane.width, 0);
      for (const cell of this.cells) this.drawCell(context, cell);
    }
    weight(node) {
      if (!this.compares) return Math.max(node.bytes, 0);
      if (node.children.length === 0) return Math.abs(node.bytes);
      return node.children.reduce((total, child) => total + this.weight(child), 0);
    }
    divide(node, path, left, right, depth) {
      const whole = node.children.reduce((total, child) => total + this.weight(child), 0);
      if (whole <= 0) return;
      const scale = (right - left) / Math.max(whole, this.compares ? 0 : node.bytes);
      let at = left;
      node.children.forEach((child) => {
        const width = this.weight(child) * scale;
        const own = [...path, child.name];
        if (width >= 0.7) {
          this.cells.push({ path: own, node: child, left: at, right: at + width, depth });
          this.divide(child, own, at, at + width, depth + 1);
        }
        at += width;
      });
    }
    drawCell(context, cell) {
      const { left, right, depth, node } = cell;
      context.fillStyle = this.compares ? node.bytes > 0 ? "#b0413e" : "#2f6fa5" : COLORS[hash(cell.path[0]) % COLORS.length];
      context.globalAlpha = 1 - 0.16 * depth;
      context.fillRect(left, depth * ROW, Math.max(right - left - 0.6, 0.5), ROW - 1);
      context.globalAlpha = 1;
      context.fillStyle = "#fff";
      const text = `${node.name || "not known"} ${this.compares ? signed(node.bytes) : sizeText(node.bytes)}`;
      label(context, text, left + 4, depth * ROW + ROW / 2, right - left - 8);
    }
    at(event) {
      const box = this.pane.canvas.getBoundingClientRect();
      const x = event.clientX - box.left;
      const depth = Math.floor((event.clientY - box.top) / ROW);
      return this.cells.find((cell) => cell.depth === depth && cell.left <= x && x < cell.right);
    }
    text({ path, node }) {
      const names = path.map((name) => name || "not known").join(" \u203A ");
      const change = `${sizeText(node.before)} before, ${signed(node.bytes)}`;
      return `${names}: ${this.compares ? change : sizeText(node.bytes)}`;
    }
  };
  function hash(text) {
    let found = 7;
    for (let i = 0; i < text.length; i++) found = found * 31 + text.charCodeAt(i) >>> 0;
    return found;
  }

  // src/search.ts
  function expression(word) {
    try {
      return new RegExp(word, "i");
    } catch {
      return new RegExp(escaped(word), "i");
    }
  }
  function escaped(text) {
    return text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&").replace(/\s/g, "\\s");
  }
  function search(data, query) {
    const words = query.trim().split(/\s+/).filter(Boolean);
    if (words.length === 0) return null;
    const each = words.map((word) => matches(data, expression(word)));
    return Uint8Array.from(data.group, (group) => Number(each.every((found) => found[group])));
  }
  function matches(data, wanted) {
    const found = new Uint8Array(data.facts.groups);
    for (const name of data.words.texts) {
      const texts = data.textOfGroups(name);
      const known = /* @__PURE__ */ new Map();
      for (let group = 0; group < found.length; group++) {
        const text = texts[group];
        if (text === 0 || found[group]) continue;
        let is = known.get(text);
        if (is === void 0) {
          is = wanted.test(`${name}:${data.words.strings[text]}`);
          known.set(text, is);
        }
        if (is) found[group] = 1;
      }
    }
    return found;
  }

  // src/state.ts
  var TABS = ["who", "bar", "steps", "books", "compare"];
  var LAYOUTS = ["address", "category", "module"];
  var ONLY = ["all", "peak", "saved", "end", "grew"];
  var MEASURES = ["held", "grew", "made", "freed", "bytetime"];
  var KEYS2 = ["module", "op", "line", "category", "phase", "role", "name", "shape", "dtype"];
  function toHash(state, usual) {
    const words = new URLSearchParams();
    for (const name of Object.keys(usual)) {
      const value = state[name];
      if (String(value) === String(usual[name])) continue;
      words.set(
        name,
        typeof value === "number" ? String(Number(value.toPrecision(12))) : String(value)
      );
    }
    return words.toString();
  }
  function fromHash(hash2, usual) {
    const words = new URLSearchParams(hash2.replace(/^#/, ""));
    const one = (name, known, otherwise) => {
      const word = words.get(name);
      return word !== null && known.includes(word) ? word : otherwise;
    };
    const number = (name, otherwise) => {
      const word = words.get(name);
      const value = word === null || word === "" ? Number.NaN : Number(word);
      return Number.isFinite(value) ? value : otherwise;
    };
    const maybe = (name, otherwise) => words.has(name) ? numberOrNull(words.get(name)) : otherwise;
    const list = (name, otherwise) => words.has(name) ? (words.get(name) ?? "").split(",").filter(Boolean) : otherwise;
    const keys = list("keys", usual.keys).filter((key) => KEYS2.includes(key));
    const from = number("from", usual.from);
    const to = number("to", usual.to);
    return {
      set: number("set", usual.set),
      axis: one("axis", ["time", "events"], usual.axis),
      from: to > from ? from : usual.from,
      to: to > from ? to : usual.to,
      low: number("low", usual.low),
      high: number("high", usual.high),
      cursor: number("cursor", usual.cursor),
      begin: maybe("begin", usual.begin),
      layout: one("layout", LAYOUTS, usual.layout),
      color: one("color", COLOR_BY, usual.color),
      only: one("only", ONLY, usual.only),
      measure: one("measure", MEASURES, usual.measure),
      keys: keys.length ? keys : usual.keys,
      hidden: list("hidden", usual.hidden),
      search: words.get("search") ?? usual.search,
      pinned: maybe("pinned", usual.pinned),
      tab: one("tab", TABS, usual.tab)
    };
  }
  function numberOrNull(word) {
    const value = word === null || word === "" || word === "null" ? Number.NaN : Number(word);
    return Number.isFinite(value) ? value : null;
  }
  var History = class {
    past = [];
    keep(state) {
      this.past.push({ ...state });
      if (this.past.length > 200) this.past.shift();
    }
    back() {
      return this.past.pop();
    }
  };

  // src/treetable.ts
  var MOST = 60;
  var TreeTable = class {
    element = h("div", { class: "scroll", tabindex: 0, role: "region" });
    open = /* @__PURE__ */ new Set();
    whole = /* @__PURE__ */ new Set();
    sort = "bytes";
    tree = null;
    options = null;
    show(tree, options) {
      this.tree = tree;
      this.options = options;
      this.draw();
    }
    draw() {
      const { tree, options } = this;
      if (!tree || !options) return;
      const body = h("tbody");
      this.rows(body, tree, [], options);
      this.element.setAttribute("aria-label", options.caption);
      fill(
        this.element,
        h(
          "table",
          { class: "tree" },
          h("caption", {}, options.caption),
          h("thead", {}, this.heads(options)),
          body,
          h("tfoot", {}, this.row("all", tree, [], options, null))
        )
      );
    }
    heads(options) {
      const head = (text, sort) => {
        const sorted = sort === this.sort ? sort === "name" ? "ascending" : "descending" : null;
        const inside = sort ? h("button", { click: () => this.by(sort) }, text) : text;
        return h("th", { scope: "col", "aria-sort": sorted }, inside);
      };
      const changed2 = options.compares ? [head("before", null), head("after", null), head("change", "bytes")] : [head("bytes", "bytes"), head("share", null)];
      return h("tr", {}, head("who", "name"), ...changed2, head("allocations", "count"));
    }
    by(sort) {
      this.sort = sort;
      this.draw();
    }
    rows(body, node, path, options) {
      const key = path.join("\0");
      const children = [...node.children].sort((a, b) => this.order(a, b));
      const shown = this.whole.has(key) ? children : children.slice(0, MOST);
      for (const child of shown) {
        const own = [...path, child.name];
        const ownKey = own.join("\0");
        const isOpen = this.open.has(ownKey);
        const toggle = () => {
          if (isOpen) this.open.delete(ownKey);
          else this.open.add(ownKey);
          this.draw();
          this.focus(ownKey);
        };
        body.append(this.row(child.name || "not known", child, own, options, toggle));
        if (isOpen) this.rows(body, child, own, options);
      }
      this.more(body, node, path, children.slice(shown.length), key);
      this.same(body, node, path);
    }
    more(body, node, path, left, key) {
      if (left.length === 0 && node.others === 0) return;
      const ask = () => {
        this.whole.add(key);
        this.draw();
      };
      const listed = node.children.reduce((total, child) => total + child.bytes, 0);
      const others = `${countText(node.others)} more, ${sizeText(node.bytes - listed)}, are in the sums`;
      const cell = h("td", { colspan: 6 });
      cell.style.paddingLeft = `${path.length + 1.6}em`;
      if (left.length)
        cell.append(h("button", { click: ask }, `show ${countText(left.length)} more`));
      else cell.append(others);
      body.append(h("tr", {}, cell));
    }
    same(body, node, path) {
      if (node.same === 0) return;
      const [rows, are] = node.same === 1 ? ["row", "is"] : ["rows", "are"];
      const text = `${countText(node.same)} ${rows} did not change and ${are} left out`;
      const cell = h("td", { colspan: 6, class: "words" }, text);
      cell.style.paddingLeft = `${path.length + 1.6}em`;
      body.append(h("tr", {}, cell));
    }
    row(name, node, path, options, toggle) {
      const key = path.join("\0");
      const isOpen = this.open.has(key);
      const mark = node.children.length > 0 && toggle;
      const opener = mark ? h(
        "button",
        { class: "open", "aria-expanded": String(isOpen), "data-key": key, click: toggle },
        isOpen ? "\u25BE" : "\u25B8",
        h("span", { class: "hidden" }, ` ${name}`)
      ) : h("span", { class: "open" });
      const chosen = toggle ? h("button", { class: "name", click: () => options.choose(path) }, name) : name;
      const head = h("th", { scope: "row" }, h("span", { class: "path" }, opener, chosen));
      head.style.paddingLeft = `${Math.max(path.length - 1, 0) * 1.2}em`;
      return h("tr", { "data-bytes": node.bytes }, head, ...this.numbers(node, options));
    }
    numbers(node, options) {
      const cell = (amount, text) => h("td", { title: exactText(amount) }, text);
      const count = h("td", {}, countText(node.count));
      if (options.compares) {
        const after2 = node.before + node.bytes;
        const change = cell(node.bytes, signed(node.bytes));
        if (node.bytes !== 0) change.className = node.bytes > 0 ? "more" : "less";
        return [
          cell(node.before, sizeText(node.before)),
          cell(after2, sizeText(after2)),
          change,
          count
        ];
      }
      const share2 = h("td", { class: "share" }, shareText(node.bytes, options.whole));
      const part = options.whole ? Math.max(0, Math.min(1, node.bytes / options.whole)) : 0;
      share2.style.setProperty("--part", `${100 * part}%`);
      return [cell(node.bytes, options.unit(node.bytes)), share2, count];
    }
    order(a, b) {
      if (this.sort === "name") return a.name.localeCompare(b.name);
      if (this.sort === "count") return Math.abs(b.count) - Math.abs(a.count);
      return Math.abs(b.bytes) - Math.abs(a.bytes);
    }
    focus(key) {
      for (const button of this.element.querySelectorAll("button.open")) {
        if (button.dataset.key === key) button.focus();
      }
    }
  };

  // src/app.ts
  var GROUPS = [
    "module,op,line",
    "category,module,op",
    "op,line,module",
    "line,op",
    "category,role,name",
    "phase,module,op",
    "name,shape,dtype"
  ];
  var MEASURE_WORDS = {
    held: "held at the cursor",
    grew: "grew over the range",
    made: "made in the range",
    freed: "freed in the range",
    bytetime: "bytes \xD7 seconds in the range"
  };
  var ONLY_WORDS = {
    all: "everything",
    peak: "alive at the peak",
    saved: "saved for backward",
    end: "alive at the end",
    grew: "made in the range and kept"
  };
  var TAB_WORDS = {
    who: "Who",
    bar: "Bar",
    steps: "Steps",
    books: "What to change",
    compare: "Compare"
  };
  var WINDOW = ["from", "to", "low", "high"];
  var REST_MS = 120;
  var App = class {
    constructor(doc, channel, places, root) {
      this.doc = doc;
      this.channel = channel;
      this.places = places;
      this.root = root;
      this.charts = new Charts(window.innerWidth < 600 ? 60 : 70);
      const choose = (path) => this.searchFor(path, this.state.keys);
      const tell = (text, event) => this.showTip(text, event);
      this.whoIcicle = new Icicle("icicle", "Who holds it, as a picture", choose, tell);
      this.compareIcicle = new Icicle("icicle", "What changed, as a picture", choose, tell);
      this.usual = this.usualState();
      this.state = fromHash(location.hash, this.usual);
      if (!this.doc.sets[this.state.set]) this.state.set = 0;
      const nothing = { change: -1, x: 0, time_ns: 0, levels: [], bytes: 0 };
      this.cursor = this.peak = nothing;
    }
    doc;
    channel;
    places;
    root;
    state;
    usual;
    history = new History();
    charts;
    drawing = null;
    strip = null;
    cursor;
    peak;
    begin = null;
    bar = null;
    hover = null;
    mostReserved = 0;
    rest = 0;
    // the timer until each bar is drawn
    busy = false;
    again = false;
    soon = 0;
    // the timer until the address is written
    wheeled = 0;
    // when the wheel last turned
    asked = 0;
    // the latest question about who holds what
    compared = null;
    whoTable = new TreeTable();
    compareTable = new TreeTable();
    whoIcicle;
    compareIcicle;
    controls = h("div", { class: "controls" });
    legend = h("div", { class: "legend" });
    sums = h("div", { class: "sums" });
    panel = h("div", { class: "panel", role: "tabpanel", id: "panel", tabindex: 0 });
    tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Views" });
    status = h("p", { class: "status", role: "status", "aria-live": "polite" });
    advice = h("p", { class: "advice" });
    tip = h("div", { class: "tip", "aria-hidden": "true" });
    notes = h("div", { class: "notes" });
    help = h("dialog", { class: "help", "aria-label": "Keys" });
    input = h("input", {
      type: "search",
      id: "search",
      placeholder: "module:h.0 op:mm line:train",
      "aria-label": "Search: words and regular expressions",
      input: () => this.change({ search: this.input.value }, false)
    });
    async start() {
      this.build();
      await this.openSet(location.hash.length > 1);
      this.listen();
    }
    get facts() {
      return this.doc.sets[this.state.set];
    }
    // -------------------------------------------------------------- state
    usualState() {
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
        tab: "who"
      };
    }
    get bounds() {
      const { begin_ns, end_ns, changes } = this.facts;
      if (this.state.axis === "events") return [-1, Math.max(changes, 1)];
      return [begin_ns, Math.max(end_ns, begin_ns + 1)];
    }
    /** Every change of what is shown comes through here. Looking elsewhere changes no numbers. */
    change(what, keep = true) {
      if (keep) this.history.keep(this.state);
      this.state = { ...this.state, ...what };
      this.keepInBounds();
      this.remember();
      if (!Object.keys(what).every((name) => WINDOW.includes(name))) this.refresh();
      else {
        this.paint();
        this.draw();
      }
    }
    keepInBounds() {
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
    remember() {
      window.clearTimeout(this.soon);
      this.soon = window.setTimeout(() => {
        try {
          history.replaceState(null, "", `#${toHash(this.state, this.usual)}`);
        } catch {
        }
      }, 200);
    }
    async undo() {
      const before = this.history.back();
      if (!before) return;
      const other = before.set !== this.state.set;
      this.state = before;
      this.remember();
      if (other) await this.openSet(true);
      else await this.refresh();
      this.input.value = this.state.search;
      this.buildControls();
    }
    async openSet(asItIs) {
      const { set } = this.state;
      if (!asItIs) {
        this.state = { ...this.usual, ...opening(this.facts), set, tab: this.state.tab };
        this.state.cursor = this.facts.peak_change;
      }
      const { axis } = this.state;
      const change = this.facts.peak_change;
      this.peak = await this.channel.ask("moment", { set, axis: this.state.axis, change });
      this.compared = null;
      this.mostReserved = this.facts.reserved.bytes.reduce((most, each) => Math.max(most, each), 0);
      this.keepInBounds();
      await this.drawStrip();
      if (this.state.pinned !== null) await this.pin(this.state.pinned, false);
      else this.bar = null;
      this.input.value = this.state.search;
      fill(this.notes, ...notes(this.facts).map((note) => h("p", {}, note)));
      this.showAdvice();
      this.buildControls();
      this.legend.dataset.axis = axis;
      await this.refresh();
    }
    async setAxis(axis) {
      const { set, from, to } = this.state;
      const old = this.state.axis;
      const [left, right] = await Promise.all(
        [from, to].map((x) => this.channel.ask("moment", { set, axis: old, x }))
      );
      const [begin, end] = await Promise.all(
        [left, right].map((at) => this.channel.ask("moment", { set, axis, change: at.change }))
      );
      const change = this.facts.peak_change;
      this.peak = await this.channel.ask("moment", { set, axis, change });
      this.change({ axis, from: begin.x, to: Math.max(end.x, begin.x + 1) });
      await this.drawStrip();
      this.paint();
    }
    // -------------------------------------------------------------- what is asked for
    get moment() {
      const { measure, cursor, begin } = this.state;
      const other = begin ?? -1;
      const range = measure !== "held";
      return {
        measure,
        at: range ? Math.max(cursor, other) : cursor,
        from: range ? Math.min(cursor, other) : other
      };
    }
    get look() {
      const { set, axis, layout, color, hidden, only, search: search2 } = this.state;
      return { set, axis, layout, color, hidden, only, search: search2, dark: isDark(), moment: this.moment };
    }
    /** Draws again and asks again; of many calls in a row only the last one counts. */
    async refresh() {
      const { set, axis, cursor, begin } = this.state;
      const asked = ++this.asked;
      const drawn = this.draw();
      const [now, other] = await Promise.all([
        this.channel.ask("moment", { set, axis, change: cursor }),
        begin === null ? null : this.channel.ask("moment", { set, axis, change: begin })
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
    async draw() {
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
    async drawEach() {
      const began = performance.now();
      await this.drawOnce(false);
      performance.measure("drawEach", { start: began, end: performance.now() });
    }
    async drawOnce(soon) {
      this.charts.measure();
      const { area, map } = this.charts;
      const { state } = this;
      const highest = this.drawing?.highest ?? this.highestAddress();
      const size2 = { width: map.pictureWidth, height: map.pictureHeight };
      const wide = { width: area.pictureWidth, height: area.pictureHeight };
      const drawing = await this.channel.ask("draw", {
        ...this.look,
        from: state.from,
        to: state.to,
        soon,
        area: { ...wide, least: this.mostReserved },
        map: { ...size2, low: state.high ? state.low : 0, high: state.high || highest }
      });
      if (!drawing) return;
      if (!state.high && drawing.highest !== highest) {
        this.drawing = drawing;
        this.again = true;
        return;
      }
      const seen = [state.from, state.to];
      const high = drawing.area.length / wide.width;
      area.put(drawing.area, wide.width, high, seen);
      map.put(drawing.map, size2.width, size2.height, seen);
      map.canvas.dataset.drawn = drawing.exact ? "each" : "coarse";
      this.drawing = drawing;
      if (this.bar && this.bottomOf(this.bar) === null) await this.pin(this.bar.allocation, false);
      this.paint();
      this.showLegend();
    }
    highestAddress() {
      const last = this.facts.regions[this.facts.regions.length - 1];
      return last ? last[1] + last[2] : 1;
    }
    async drawStrip() {
      this.charts.measure();
      const { strip } = this.charts;
      const { set, axis } = this.state;
      const [width, height] = [strip.pictureWidth, strip.pictureHeight];
      this.strip = await this.channel.ask("strip", { set, axis, width, height });
      strip.put(this.strip.area, width, height, this.bounds);
    }
    /** Only what lies on top of the pictures. */
    paint() {
      this.charts.draw(this.view());
    }
    view() {
      const { state, facts, bar } = this;
      const byTime = state.axis === "time";
      const left = bar && (byTime ? bar.start_ns ?? facts.begin_ns : bar.start);
      const right = bar && (byTime ? bar.end_ns ?? facts.end_ns : bar.end);
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
        bar: bar && left !== null && right !== null && bottom !== null ? { left, right, low: bottom, high: bottom + bar.bytes } : null
      };
    }
    bottomOf(bar) {
      return bar.bottoms[this.state.layout] ?? null;
    }
    // -------------------------------------------------------------- what is around the pictures
    build() {
      const { strip, bands, area, map } = this.charts;
      const charts = h("section", { class: "charts", "aria-label": "Pictures" });
      charts.append(strip.canvas, bands.canvas, area.canvas, map.canvas, this.legend, this.notes);
      const side = h("section", { class: "side", "aria-label": "Numbers" }, this.sums, this.tabs);
      side.append(this.panel);
      this.help.append(HELP(() => this.help.close()));
      const columns2 = h("div", { class: "columns" }, charts, side);
      fill(this.root, this.controls, this.advice, this.status, columns2);
      this.root.append(this.tip, this.help);
      const tabs = TABS.map(
        (tab) => h(
          "button",
          {
            role: "tab",
            id: `tab-${tab}`,
            "aria-controls": "panel",
            "data-tab": tab,
            click: () => this.change({ tab })
          },
          TAB_WORDS[tab]
        )
      );
      fill(this.tabs, ...tabs);
    }
    buildControls() {
      const { state, doc } = this;
      const sets = doc.sets.map((set, i) => [
        String(i),
        `${set.name}, ${set.device}`
      ]);
      const words = (names) => names.map((name) => [name, name]);
      const only = Object.entries(ONLY_WORDS);
      fill(
        this.controls,
        sets.length > 1 && choice("trace", sets, String(state.set), (set) => this.toSet(Number(set))),
        choice("across", words(["time", "events"]), state.axis, (axis) => this.setAxis(axis)),
        choice(
          "up",
          words(LAYOUTS),
          state.layout,
          (layout) => this.change({ layout, low: 0, high: 0 })
        ),
        choice(
          "colour",
          words(COLOR_BY),
          state.color,
          (color) => this.change({ color })
        ),
        choice("only", only, state.only, (value) => this.change({ only: value })),
        h("label", { class: "choice grow", for: "search" }, "search ", this.input),
        h("button", { click: () => this.toPeak() }, "peak"),
        h("button", { click: () => this.fit() }, "all"),
        h(
          "button",
          { click: () => this.toggleRange() },
          state.begin === null ? "range" : "end range"
        ),
        h("button", { click: () => this.savePicture() }, "save picture"),
        h("button", { click: () => this.toggleTheme() }, "light or dark"),
        h("button", { click: () => this.help.showModal() }, "keys ?")
      );
    }
    showLegend() {
      const entries = this.drawing?.legend ?? [];
      const items = entries.map((entry) => h("span", {}, swatch(entry.color), entry.name));
      fill(this.legend, h("b", {}, `${this.state.color}: `), ...items);
    }
    /** The sums at the cursor; the same numbers as in Python's table where the cursor is at the peak. */
    showSums() {
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
            click: () => this.toggleCategory(name)
          },
          swatch(doc.colors[name]),
          name
        );
        const row = own.get(name);
        return [
          toggle,
          size(level),
          shareText(level, cursor.bytes),
          size(row?.at_peak ?? 0),
          size(row?.own_peak ?? 0)
        ];
      });
      const total = ["all", size(cursor.bytes), "", size(facts.peak.bytes), ""];
      const heads = ["category", "at the cursor", "share", "at the peak", "own peak"];
      fill(this.sums, table(this.where(), heads, rows, total));
    }
    where() {
      const { facts, cursor } = this;
      const at = cursor.change === facts.peak_change ? "At the peak" : "At the cursor";
      const step = this.stepOf(cursor.change);
      const name = step < 0 ? "" : `, step ${facts.first_step + facts.steps[step].step}`;
      return `${at}${name}: ${timeText(cursor.time_ns)} after the start, on ${facts.device}`;
    }
    showStatus() {
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
    /** The hint in one line; a click leads to all of it. */
    showAdvice() {
      const advice = firstAdvice(this.facts);
      this.advice.hidden = advice === null;
      if (!advice) return;
      const text = h("span", { class: "sentence", title: advice.text }, prose(advice.text));
      const toAll = () => this.change({ tab: "books" });
      const whole = h("button", { class: "whole", click: toAll }, TAB_WORDS.books);
      fill(this.advice, h("b", {}, `${advice.kind}: `), text, whole);
    }
    showTabs() {
      for (const tab of this.tabs.querySelectorAll("[role=tab]")) {
        const chosen = tab.dataset.tab === this.state.tab;
        tab.setAttribute("aria-selected", String(chosen));
        tab.tabIndex = chosen ? 0 : -1;
      }
      this.panel.setAttribute("aria-labelledby", `tab-${this.state.tab}`);
      const { state, input } = this;
      if (document.activeElement !== input) input.value = state.search;
    }
    async showPanel(asked) {
      const { tab } = this.state;
      if (tab === "who") await this.showWho(asked);
      else if (tab === "bar") await this.showBar(asked);
      else if (tab === "steps") this.showSteps();
      else if (tab === "books") this.showBooks();
      else await this.showCompare(asked);
      this.panel.dataset.tab = tab;
      this.panel.dataset.asked = String(asked);
    }
    async showWho(asked) {
      const who = await this.channel.ask("who", { ...this.look, keys: this.state.keys });
      if (asked !== this.asked) return;
      const { state, facts } = this;
      const groups = GROUPS.map((keys) => [keys, keys.replaceAll(",", " \u2192 ")]);
      const measures = Object.entries(MEASURE_WORDS);
      const first = this.panel.dataset.tab !== "who";
      const controls = h(
        "div",
        { class: "controls" },
        choice(
          "bytes",
          measures,
          state.measure,
          (value) => this.change({ measure: value })
        ),
        choice("by", groups, state.keys.join(","), (keys) => this.change({ keys: keys.split(",") })),
        h("button", { click: () => this.saveTable(who) }, "save table")
      );
      const unit = state.measure === "bytetime" ? (n) => `${sizeText(n)}\xB7s` : sizeText;
      const sums = h("p", { class: "found", "data-bytes": who.bytes }, this.foundText(who, unit));
      if (!first) fill(this.panel.firstElementChild ?? this.panel, controls, sums);
      else
        fill(
          this.panel,
          h("div", {}, controls, sums),
          this.whoIcicle.pane.canvas,
          this.whoTable.element
        );
      this.whoIcicle.show(who.tree, state.keys.length);
      this.whoTable.show(who.tree, {
        caption: `Who: ${MEASURE_WORDS[state.measure]}`,
        whole: state.measure === "held" ? facts.peak.bytes : who.allBytes,
        unit,
        compares: false,
        choose: (path) => this.searchFor(path, state.keys)
      });
    }
    foundText(who, unit) {
      const { state } = this;
      const all = `${unit(who.allBytes)} in ${countText(who.allCount)} allocations`;
      const rest = who.rest ? `; ${sizeText(who.rest)} of it in those that are not drawn` : "";
      if (!state.search) return `${all}${rest}; shares are of the peak.`;
      return `Found ${unit(who.bytes)} in ${countText(who.count)} allocations, of ${all}${rest}.`;
    }
    async showBar(asked) {
      const rows = await this.channel.ask("rows", { ...this.look, most: 50 });
      if (asked !== this.asked) return;
      const { bar } = this;
      const list = rows.map((row) => [
        h("button", { click: () => this.pin(row.allocation) }, countText(row.row)),
        size(row.bytes),
        row.texts.category,
        [row.texts.name, row.texts.shape].filter(Boolean).join(" "),
        row.texts.module,
        row.texts.op,
        row.texts.line
      ]);
      const heads = ["number", "bytes", "category", "tensor", "module", "op", "line"];
      const largest = table("The largest bars at the cursor", heads, list);
      fill(
        this.panel,
        bar ? details(bar, this.doc.source, (like) => this.searchAlike(like)) : null,
        bar ? h("button", { click: () => this.unpin() }, "unpin") : h("p", {}, "Click a bar to pin it."),
        list.length ? largest : this.noBars()
      );
    }
    noBars() {
      const { search: search2, only } = this.state;
      const among = only === "all" ? "" : ` of "${ONLY_WORDS[only]}"`;
      if (!search2) return h("p", {}, `No bar${among} is alive at the cursor.`);
      return h(
        "p",
        {},
        `No bar${among} at the cursor matches the search. Esc ends the search. `,
        h("button", { click: () => this.endSearch() }, "end the search")
      );
    }
    showSteps() {
      const go = (step) => this.toStep(step);
      const compare = (step) => this.compareSteps(step - 1, step);
      fill(this.panel, steps(this.facts, { go, compare }));
    }
    showBooks() {
      const { facts } = this;
      const show = (line2, module) => this.searchWhere(line2, module);
      fill(
        this.panel,
        findings(facts, show),
        ...(facts.ledgers ?? []).map(ledger),
        parameters(facts),
        health(facts),
        costs(facts)
      );
    }
    async showCompare(asked) {
      const sides = await this.sides();
      const [before, after2] = this.compared ?? this.usualSides(sides);
      const { keys } = this.state;
      const tree = await this.channel.ask("compare", { keys, before, after: after2 });
      if (asked !== this.asked) return;
      const options = sides.map(([text], i) => [String(i), text]);
      const place = (side) => String(sides.findIndex(([, s]) => s.set === side.set && s.change === side.change));
      const set = (which, i) => {
        const found = [before, after2];
        found[which] = sides[Number(i)][1];
        this.compared = found;
        this.refresh();
      };
      const groups = GROUPS.map((k) => [k, k.replaceAll(",", " \u2192 ")]);
      const change = `${tree.bytes >= 0 ? "+" : ""}${sizeText(tree.bytes)}`;
      fill(
        this.panel,
        h(
          "div",
          { class: "controls" },
          choice("before", options, place(before), (i) => set(0, i)),
          choice("after", options, place(after2), (i) => set(1, i)),
          choice("by", groups, keys.join(","), (k) => this.change({ keys: k.split(",") }))
        ),
        h("p", { "data-bytes": tree.bytes, title: exactText(tree.bytes) }, `Change ${change}.`),
        this.compareIcicle.pane.canvas,
        this.compareTable.element
      );
      this.compareIcicle.show(tree, keys.length, true);
      this.compareTable.show(tree, {
        caption: "What changed",
        whole: 0,
        unit: sizeText,
        compares: true,
        choose: (path) => this.searchFor(path, keys)
      });
    }
    /** The moments that can be compared, of every trace of the page. */
    async sides() {
      const found = [];
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
    stepPeaks = /* @__PURE__ */ new Map();
    async stepPeak(set, step) {
      const key = `${set} ${step}`;
      const known = this.stepPeaks.get(key);
      if (known !== void 0) return known;
      const [from, to] = this.places[set].steps[step];
      const found = await this.channel.ask("peak", { set, axis: "events", from, to });
      this.stepPeaks.set(key, found.change);
      return found.change;
    }
    usualSides(sides) {
      const peak = (set) => ({ set, change: this.doc.sets[set].peak_change });
      if (this.doc.sets.length > 1) {
        const device = this.doc.sets[0].device;
        const other = this.doc.sets.findIndex((set, i) => i > 0 && set.device === device);
        return [peak(0), peak(Math.max(other, 1))];
      }
      const steps2 = sides.filter(([text]) => text.includes("step"));
      if (steps2.length > 1) return [steps2[0][1], steps2[steps2.length - 1][1]];
      return [{ set: 0, change: -1 }, peak(0)];
    }
    // -------------------------------------------------------------- what a person does
    stepOf(change) {
      const steps2 = this.places[this.state.set].steps;
      return steps2.findIndex(([, last]) => change <= last);
    }
    toSet(set) {
      this.history.keep(this.state);
      this.state = { ...this.state, set };
      this.drawing = null;
      this.openSet(false).then(() => this.remember());
    }
    toPeak() {
      this.goTo(this.facts.peak_change, this.peak.x);
    }
    /** Moves the cursor there, and what is seen if it is not seen. */
    goTo(change, x) {
      const { from, to } = this.state;
      const half = (to - from) / 2;
      const seen = from <= x && x <= to;
      this.change({ cursor: change, ...seen ? {} : { from: x - half, to: x + half } });
    }
    async toStep(step) {
      const { set, axis } = this.state;
      const row = this.facts.steps[step];
      if (!row) return;
      const range = this.places[set].steps[step];
      const [from, to] = axis === "time" ? [row.start_ns, row.end_ns] : range;
      this.change({ cursor: await this.stepPeak(set, step), from, to });
    }
    nextStep(by) {
      const now = this.stepOf(this.state.cursor);
      const last = this.facts.steps.length - 1;
      this.toStep(Math.max(0, Math.min(last, now < 0 ? last : now + by)));
    }
    async compareSteps(before, after2) {
      const { set } = this.state;
      const [one, other] = [await this.stepPeak(set, before), await this.stepPeak(set, after2)];
      this.compared = [
        { set, change: one },
        { set, change: other }
      ];
      this.change({ tab: "compare" });
    }
    fit() {
      const [from, to] = this.bounds;
      this.change({ from, to, low: 0, high: 0 });
    }
    zoom(factor, around, keep = true) {
      const { from, to } = this.state;
      const at = from + (to - from) * around;
      this.change({ from: at - (at - from) * factor, to: at + (to - at) * factor }, keep);
    }
    pan(share2, keep = true) {
      const by = (this.state.to - this.state.from) * share2;
      this.change({ from: this.state.from + by, to: this.state.to + by }, keep);
    }
    async stepCursor(by) {
      const { set, axis } = this.state;
      const at = await this.channel.ask("moment", { set, axis, change: this.state.cursor + by });
      this.goTo(at.change, at.x);
    }
    toggleRange() {
      const { begin, cursor, measure } = this.state;
      const open2 = begin === null;
      const now = open2 ? measure === "held" ? "grew" : measure : "held";
      this.change({ begin: open2 ? cursor : null, measure: now });
      this.buildControls();
    }
    toggleCategory(name) {
      const { hidden } = this.state;
      const without = hidden.filter((each) => each !== name);
      this.change({ hidden: without.length < hidden.length ? without : [...hidden, name] });
    }
    toggleTheme() {
      document.documentElement.dataset.theme = isDark() ? "light" : "dark";
      this.refresh();
    }
    /** What is typed next replaces the old search. */
    toSearch() {
      this.input.focus();
      this.input.select();
    }
    endSearch() {
      this.input.value = "";
      this.change({ search: "" });
    }
    searchFor(path, keys) {
      const words = path.map((name, i) => name ? `^${keys[i]}:${escaped(name)}$` : "");
      this.change({ search: words.filter(Boolean).join(" ") });
    }
    searchWhere(line2, module) {
      const words = [
        line2 && `^line:${escaped(line2)}$`,
        !line2 && module && `^module:${escaped(module)}$`
      ];
      this.change({ search: words.filter(Boolean).join(" "), tab: "who" });
    }
    searchAlike(bar) {
      const keys = ["category", "module", "op", "line", "shape"];
      this.searchFor(
        keys.map((key) => bar.texts[key]),
        keys
      );
    }
    async pin(allocation, keep = true) {
      const { set } = this.state;
      this.bar = await this.channel.ask("bar", { set, allocation });
      if (keep) this.change({ pinned: allocation, tab: "bar" });
    }
    unpin() {
      this.bar = null;
      this.change({ pinned: null });
    }
    savePicture() {
      const { strip, bands, area, map } = this.charts;
      const panes = [strip, bands, area, map].map((pane) => pane.canvas);
      const whole = h("canvas", {
        width: map.canvas.width,
        height: panes.reduce((total, pane) => total + pane.height, 0)
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
    saveTable(who) {
      const lines = [[...this.state.keys, "bytes", "allocations"]];
      const walk = (node, path) => {
        if (node.children.length === 0) {
          lines.push([...path, String(node.bytes), String(node.count)]);
        }
        for (const child of node.children) walk(child, [...path, child.name]);
      };
      walk(who.tree, []);
      const quoted = (text2) => `"${text2.replaceAll('"', '""')}"`;
      const text = lines.map((cells) => cells.map(quoted).join(",")).join("\n");
      save(`${this.facts.name}.csv`, [`${text}
`], "text/csv");
    }
    // -------------------------------------------------------------- mouse, wheel and keys
    listen() {
      document.addEventListener("keydown", (event) => this.key(event));
      window.addEventListener("hashchange", () => {
        const state = fromHash(location.hash, this.usual);
        if (toHash(state, this.usual) === toHash(this.state, this.usual)) return;
        this.history.keep(this.state);
        this.state = this.doc.sets[state.set] ? state : { ...state, set: 0 };
        this.openSet(true);
      });
      let first = true;
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
    wheel(event, pane) {
      event.preventDefault();
      if (event.timeStamp - this.wheeled > 600) this.history.keep(this.state);
      this.wheeled = event.timeStamp;
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.pan((event.deltaX || event.deltaY) / 1e3, false);
      } else this.zoom(1.0016 ** event.deltaY, pane.shareOf(event), false);
    }
    /** Dragging moves; with Shift it is a box that is looked into; without moving it is a click. */
    drag(event, where) {
      if (event.button !== 0) return;
      const pane = this.charts[where];
      const { from, to, low } = this.state;
      const high = this.state.high || (this.drawing?.highest ?? 1);
      const begin = { x: pane.shareOf(event), y: pane.heightOf(event) };
      this.history.keep(this.state);
      let moved = false;
      const move = (e) => {
        const x = pane.shareOf(e);
        moved ||= Math.abs(e.clientX - event.clientX) + Math.abs(e.clientY - event.clientY) > 4;
        if (!moved || event.shiftKey) return;
        const by = (begin.x - x) * (to - from);
        const up = this.state.high ? (begin.y - pane.heightOf(e)) * (high - low) : 0;
        const vertical2 = where === "map" && this.state.high ? { low: low + up, high: high + up } : {};
        this.change({ from: from + by, to: to + by, ...vertical2 }, false);
      };
      const end = (e) => {
        window.removeEventListener("pointermove", move);
        window.removeEventListener("pointerup", end);
        if (!moved) this.click(e, where);
        else if (event.shiftKey) {
          const xs = [begin.x, pane.shareOf(e)].sort((a, b) => a - b);
          const ys = [begin.y, pane.heightOf(e)].sort((a, b) => a - b);
          const box = { from: from + xs[0] * (to - from), to: from + xs[1] * (to - from) };
          const vertical2 = { low: low + ys[0] * (high - low), high: low + ys[1] * (high - low) };
          this.change(where === "map" && ys[1] - ys[0] > 0.02 ? { ...box, ...vertical2 } : box, false);
        }
      };
      window.addEventListener("pointermove", move);
      window.addEventListener("pointerup", end);
    }
    async click(event, where) {
      const { set, axis } = this.state;
      const x = this.xAt(event, where);
      const at = await this.channel.ask("moment", { set, axis, x });
      const bar = where === "map" ? await this.barUnder(event) : null;
      this.bar = bar ?? this.bar;
      const pinned = bar ? { pinned: bar.allocation, tab: "bar" } : {};
      this.change({ cursor: at.change, ...pinned }, false);
    }
    brush(event) {
      const pane = this.charts.strip;
      const [first, last] = this.bounds;
      const begin = pane.shareOf(event);
      this.history.keep(this.state);
      const show = (e) => {
        const [left, right] = [begin, pane.shareOf(e)].sort((a, b) => a - b);
        const half = right - left < 5e-3 ? (this.state.to - this.state.from) / (last - first) / 2 : 0;
        const at = (share2) => first + share2 * (last - first);
        this.change({ from: at(left - half), to: at(right + half) }, false);
      };
      const end = (e) => {
        show(e);
        window.removeEventListener("pointermove", show);
        window.removeEventListener("pointerup", end);
      };
      window.addEventListener("pointermove", show);
      window.addEventListener("pointerup", end);
    }
    xAt(event, where) {
      const { from, to } = this.state;
      return from + this.charts[where].shareOf(event) * (to - from);
    }
    async hoverArea(event) {
      const { set, axis } = this.state;
      const x = this.xAt(event, "area");
      this.hover = x;
      const at = await this.channel.ask("moment", { set, axis, x });
      if (this.hover !== x) return;
      const parts = this.doc.categories.map((name, i) => [name, at.levels[i]]).filter(([, bytes]) => bytes > 0).map(([name, bytes]) => `${name} ${sizeText(bytes)}`);
      this.showTip(`${timeText(at.time_ns)}: ${sizeText(at.bytes)}
${parts.join("\n")}`, event);
      this.paint();
    }
    async hoverMap(event) {
      const x = this.xAt(event, "map");
      const began = performance.now();
      this.hover = x;
      const bar = await this.barUnder(event);
      performance.measure("hover", { start: began, end: performance.now() });
      if (this.hover !== x) return;
      this.showTip(bar ? oneLine(bar) : "", event);
      this.paint();
    }
    barUnder(event) {
      const pane = this.charts.map;
      const { from, to, low } = this.state;
      const high = this.state.high || (this.drawing?.highest ?? 1);
      return this.channel.ask("hit", {
        ...this.look,
        from,
        to,
        x: this.xAt(event, "map"),
        bytes: (this.state.high ? low : 0) + pane.heightOf(event) * (high - (this.state.high ? low : 0)),
        reachX: 0.5 * (to - from) / pane.pictureWidth,
        reachBytes: high / pane.pictureHeight
      });
    }
    showTip(text, event) {
      this.tip.textContent = text;
      this.tip.hidden = !text;
      if (!event || !text) return;
      const width = Math.min(360, window.innerWidth - 16);
      this.tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, window.innerWidth - width))}px`;
      this.tip.style.top = `${Math.min(event.clientY + 16, window.innerHeight - 60)}px`;
    }
    tabKey(event) {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.stopPropagation();
      event.preventDefault();
      const at = (TABS.indexOf(this.state.tab) + by + TABS.length) % TABS.length;
      this.change({ tab: TABS[at] });
      this.tabs.querySelector(`#tab-${TABS[at]}`)?.focus();
    }
    key(event) {
      const target = event.target;
      if (this.help.open) return;
      if (target === this.input && event.key === "Enter") this.input.blur();
      if (target === this.input && event.key === "Escape") {
        this.input.blur();
        this.endSearch();
      }
      if (/^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || event.ctrlKey || event.metaKey) return;
      const actions = {
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
        Escape: () => this.state.search ? this.endSearch() : this.unpin()
      };
      const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
      if (!action) return;
      event.preventDefault();
      action();
    }
    cursorShare() {
      const { from, to } = this.state;
      const share2 = (this.cursor.x - from) / (to - from);
      return share2 >= 0 && share2 <= 1 ? share2 : 0.5;
    }
  };
  function opening(facts) {
    const axis = isMostlyIdle(facts) ? "events" : "time";
    const byTime = axis === "time";
    const { steps: steps2, begin_ns, end_ns, changes, peak } = facts;
    const [first, last] = byTime ? [begin_ns, Math.max(end_ns, begin_ns + 1)] : [-1, Math.max(changes, 1)];
    const at = steps2.findIndex((row) => row.start_ns <= peak.time_ns && peak.time_ns <= row.end_ns);
    const grows = facts.findings?.some((row) => row.kind === "growth");
    if (steps2.length < 2 || at < 0 || grows) return { axis, from: first, to: last };
    const [begin, end] = byTime ? [steps2[at].start_ns, steps2[at].end_ns] : [steps2[at - 1]?.last_change ?? first, steps2[at].last_change];
    const around = Math.max((end - begin) / 2, byTime ? 100 : 4);
    return { axis, from: Math.max(begin - around, first), to: Math.min(end + around, last) };
  }
  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    if (chosen) return chosen === "dark";
    return matchMedia("(prefers-color-scheme: dark)").matches;
  }

  // src/decode.ts
  function fromBase64(text) {
    const known = Uint8Array;
    if (known.fromBase64) return known.fromBase64(text);
    const letters = atob(text);
    const bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
    return bytes;
  }
  async function inflate(bytes) {
    if (bytes.length === 0) return bytes;
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  function asUint32(planes, count) {
    const found = new Uint32Array(count);
    const [second, third, fourth] = [count, 2 * count, 3 * count];
    if (planes.length === count) found.set(planes);
    else if (planes.length === third) {
      for (let i = 0; i < count; i++) found[i] = planes[i] | planes[second + i] << 8;
    } else if (planes.length === fourth) {
      for (let i = 0; i < count; i++) {
        found[i] = planes[i] | planes[second + i] << 8 | planes[third + i] << 16;
      }
    } else if (planes.length > fourth) {
      for (let i = 0; i < count; i++) {
        const low = planes[i] | planes[second + i] << 8;
        found[i] = low | planes[third + i] << 16 | planes[fourth + i] << 24;
      }
    }
    return found;
  }
  function asNumbers(planes, count) {
    const found = new Float64Array(count);
    for (let from = 0, worth = 1; from < planes.length; from += count, worth *= 256) {
      for (let i = 0; i < count; i++) found[i] += planes[from + i] * worth;
    }
    return found;
  }
  var unfolded = (value) => value >>> 1 ^ -(value & 1);

  // src/dataset.ts
  var BLOCK = 64;
  var SKIP = 1024;
  var COLUMNS = [
    ...["kind", "address", "life", "clock", "begins", "row"],
    ...["group", "texts", "sizes", "blocks"]
  ];
  function after(values, value, low = 0, high = values.length) {
    while (low < high) {
      const middle = low + high >>> 1;
      if (values[middle] <= value) low = middle + 1;
      else high = middle;
    }
    return low;
  }
  var Dataset = class {
    constructor(facts, words, columns2) {
      this.facts = facts;
      this.words = words;
      this.count = facts.shown;
      this.changes = facts.changes;
      this.kind = asUint32(columns2.kind, this.count);
      this.address = asUint32(columns2.address, this.count);
      this.size = asNumbers(columns2.sizes, facts.kinds);
      this.block = asNumbers(columns2.blocks, facts.kinds).map((bytes) => bytes - 1);
      this.group = asUint32(columns2.group, facts.kinds);
      this.categories = words.categories.length;
      const { groups } = facts;
      const texts = asUint32(columns2.texts, words.texts.length * groups);
      words.texts.forEach((name, i) => {
        this.ofGroups.set(name, texts.subarray(i * groups, (i + 1) * groups));
      });
      this.category = this.categoriesOfKinds();
      this.time = this.times(asUint32(columns2.clock, this.changes));
      this.begins = new Uint8Array(this.changes);
      this.of = new Uint32Array(this.changes);
      this.start = new Int32Array(this.count);
      this.end = new Int32Array(this.count);
      this.latestEnd = new Int32Array(Math.ceil(this.count / SKIP));
      this.placeInTime(columns2);
      this.rows = columns2.row.length ? this.rowsOf(asUint32(columns2.row, this.count)) : null;
      this.highest = this.highestAddress();
      const blocks = Math.ceil(this.changes / BLOCK) + 1;
      this.levels = new Float64Array(blocks * this.categories);
      this.blockPeak = new Float64Array(blocks).fill(-1);
      this.blockPeakAt = new Int32Array(blocks);
      this.total = new Float64Array(this.changes);
      this.addUp();
    }
    facts;
    words;
    count;
    changes;
    kind;
    address;
    start;
    end;
    of;
    // per change, the allocation
    begins;
    // per change, 1 where something begins
    time;
    // per change, nanoseconds
    size;
    // per kind
    block;
    // per kind; -1: not known
    group;
    // per kind: those of one group have the same texts
    category;
    // per kind
    latestEnd;
    // per run of SKIP allocations
    highest;
    // the largest address in use, in units
    ofGroups = /* @__PURE__ */ new Map();
    ofKinds = /* @__PURE__ */ new Map();
    rows;
    // null: one after the other
    total;
    // per change, bytes after it
    levels;
    // per block of changes and category, before the block
    blockPeak;
    // per block, the highest total after one of its changes
    blockPeakAt;
    categories;
    /** Per group of kinds, the text's place in the table of strings. */
    textOfGroups(name) {
      const found = this.ofGroups.get(name);
      if (!found) throw new Error(`kinds have no ${name}`);
      return found;
    }
    /** The same per kind. */
    text(name) {
      let found = this.ofKinds.get(name);
      if (!found) {
        const texts = this.textOfGroups(name);
        found = this.group.map((group) => texts[group]);
        this.ofKinds.set(name, found);
      }
      return found;
    }
    sizeOf(allocation) {
      return this.size[this.kind[allocation]];
    }
    /** The allocation's row in Python's table. */
    rowOf(allocation) {
      return this.rows ? this.rows[allocation] : this.facts.first_row + allocation;
    }
    /** The last change at this time, -1 before the first. */
    changeAt(axis, x) {
      if (axis === "events") return Math.max(-1, Math.min(this.changes - 1, Math.floor(x)));
      return after(this.time, x) - 1;
    }
    xOf(axis, change) {
      if (axis === "events") return change;
      if (change < 0) return this.facts.begin_ns;
      return change < this.changes ? this.time[change] : this.facts.end_ns;
    }
    bounds(axis) {
      if (axis === "events") return [-1, Math.max(this.changes, 1)];
      return [this.facts.begin_ns, Math.max(this.facts.end_ns, this.facts.begin_ns + 1)];
    }
    /** Bytes per category after the change. */
    levelsAt(change, into = new Float64Array(this.categories)) {
      const block = Math.floor((change + 1) / BLOCK);
      const from = block * this.categories;
      for (let c = 0; c < this.categories; c++) into[c] = this.levels[from + c];
      for (let k = block * BLOCK; k <= change; k++) this.apply(into, k);
      this.addRest(into, change);
      return into;
    }
    /** The change in [first, last] after which most is allocated; the first of equals. */
    peakIn(first, last) {
      let best = first;
      let most = this.totalAt(first);
      let k = first + 1;
      while (k <= last) {
        const block = Math.floor(k / BLOCK);
        const stop = Math.min(last + 1, (block + 1) * BLOCK);
        if (this.blockPeak[block] <= most) {
          k = stop;
        } else if (k === block * BLOCK && stop === k + BLOCK) {
          most = this.blockPeak[block];
          best = this.blockPeakAt[block];
          k = stop;
        } else {
          for (; k < stop; k++) {
            if (this.total[k] > most) {
              most = this.total[k];
              best = k;
            }
          }
        }
      }
      return best;
    }
    /** Bytes after the change. */
    totalAt(change) {
      return change < 0 ? sum(this.levelsAt(-1)) : this.total[change];
    }
    /** Calls back for each allocation that is alive after some change in [first, last]. */
    overlapping(first, last, each) {
      for (const [begin, stop] of this.runs(first, last)) {
        for (let i = begin; i < stop; i++) if (this.end[i] > first) each(i);
      }
    }
    /** Stretches of allocations that begin by `last`, and of which some may end after `first`. */
    runs(first, last) {
      const until = after(this.start, last);
      const found = [];
      for (let run = 0; run * SKIP < until; run++) {
        if (this.latestEnd[run] > first) found.push([run * SKIP, Math.min(until, (run + 1) * SKIP)]);
      }
      return found;
    }
    alive(allocation, change) {
      return this.start[allocation] <= change && this.end[allocation] > change;
    }
    apply(levels, change) {
      const kind = this.kind[this.of[change]];
      levels[this.category[kind]] += this.begins[change] ? this.size[kind] : -this.size[kind];
    }
    /** What is in no allocation of this page: Python knows its sums at some changes. */
    addRest(levels, change) {
      const rest = this.facts.rest;
      if (!rest) return;
      const at = Math.max(after(rest.at, change) - 1, 0);
      for (const [name, values] of Object.entries(rest.levels)) {
        levels[this.words.categories.indexOf(name)] += values[at];
      }
    }
    /** The same for all categories together, per moment that Python wrote down. */
    restTotals() {
      const { at, levels } = this.facts.rest ?? { at: [], levels: {} };
      return at.map((_, i) => sum(Object.values(levels).map((values) => values[i])));
    }
    categoriesOfKinds() {
      const number = new Map(this.words.categories.map((name, i) => [name, i]));
      const unknown = number.get("unknown") ?? 0;
      const ofGroups = Uint8Array.from(
        this.textOfGroups("category"),
        (text) => number.get(this.words.strings[text]) ?? unknown
      );
      return Uint8Array.from(this.group, (group) => ofGroups[group]);
    }
    times(clock) {
      const { begin_ns, unit_ns } = this.facts;
      const times = new Float64Array(clock.length);
      let units = 0;
      for (let k = 0; k < clock.length; k++) {
        units += clock[k];
        times[k] = begin_ns + units * unit_ns;
      }
      return times;
    }
    placeInTime(columns2) {
      const { start: start2, end, of, changes, count } = this;
      const { before } = this.facts;
      const { begins } = columns2;
      const life = asUint32(columns2.life, count);
      let next = before;
      start2.fill(-1, 0, next);
      for (let k = 0; k < changes; k++) {
        if (!(begins[k >> 3] >> (k & 7) & 1)) continue;
        this.begins[k] = 1;
        of[k] = next;
        start2[next++] = k;
      }
      for (let i = 0; i < count; i++) {
        const last = start2[i] + life[i];
        end[i] = last;
        if (last < changes) of[last] = i;
        const run = i / SKIP | 0;
        if (last > this.latestEnd[run]) this.latestEnd[run] = last;
      }
    }
    rowsOf(steps2) {
      let row = this.facts.first_row - 1;
      return Int32Array.from(steps2, (step) => {
        row += unfolded(step) + 1;
        return row;
      });
    }
    highestAddress() {
      const regions = this.facts.regions;
      if (regions.length === 0) return 1;
      const [, offset, length] = regions[regions.length - 1];
      return Math.max(Math.ceil((offset + length) / this.facts.address_unit), 1);
    }
    addUp() {
      const { kind: kinds, of, begins, size: size2, category, total: totals2, facts, changes } = this;
      const levels = new Float64Array(this.categories);
      for (let i = 0; i < facts.before; i++) levels[category[kinds[i]]] += size2[kinds[i]];
      let total = sum(levels);
      const at = facts.rest?.at ?? [];
      const rests = this.restTotals();
      let rest = 0;
      for (let from = 0, block = 0; from < changes; from += BLOCK, block++) {
        this.levels.set(levels, block * this.categories);
        const stop = Math.min(from + BLOCK, changes);
        let [most, best] = [-1, 0];
        for (let k = from; k < stop; k++) {
          const kind = kinds[of[k]];
          const amount = begins[k] ? size2[kind] : -size2[kind];
          levels[category[kind]] += amount;
          total += amount;
          while (rest + 1 < at.length && at[rest + 1] <= k) rest++;
          const whole = rests.length ? total + rests[rest] : total;
          totals2[k] = whole;
          if (whole > most) {
            most = whole;
            best = k;
          }
        }
        this.blockPeak[block] = most;
        this.blockPeakAt[block] = best;
      }
      if (changes % BLOCK === 0) this.levels.set(levels, changes / BLOCK * this.categories);
    }
  };
  function sum(values) {
    let total = 0;
    for (let i = 0; i < values.length; i++) total += values[i];
    return total;
  }

  // src/lanes.ts
  var MOST_GAPS = 64;
  var Room = class {
    begins = [];
    // of the gaps, by address
    sizes = [];
    top = 0;
    height = 0;
    take(size2) {
      const until = Math.min(this.begins.length, MOST_GAPS);
      for (let i = 0; i < until; i++) {
        if (this.sizes[i] < size2) continue;
        const begin2 = this.begins[i];
        this.begins[i] += size2;
        this.sizes[i] -= size2;
        if (this.sizes[i] === 0) this.remove(i);
        return begin2;
      }
      const begin = this.top;
      this.top += size2;
      this.height = Math.max(this.height, this.top);
      return begin;
    }
    give(begin, size2) {
      let at = 0;
      let high = this.begins.length;
      while (at < high) {
        const middle = at + high >>> 1;
        if (this.begins[middle] < begin) at = middle + 1;
        else high = middle;
      }
      const joinsNext = at < this.begins.length && this.begins[at] === begin + size2;
      const joinsLast = at > 0 && this.begins[at - 1] + this.sizes[at - 1] === begin;
      if (joinsNext) {
        this.begins[at] = begin;
        this.sizes[at] += size2;
      }
      if (joinsLast) {
        this.sizes[at - 1] += joinsNext ? this.sizes[at] : size2;
        if (joinsNext) this.remove(at);
      }
      if (!joinsNext && !joinsLast) {
        this.begins.splice(at, 0, begin);
        this.sizes.splice(at, 0, size2);
      }
      const last = this.begins.length - 1;
      if (last >= 0 && this.begins[last] + this.sizes[last] === this.top) {
        this.top = this.begins[last];
        this.remove(last);
      }
    }
    remove(at) {
      this.begins.splice(at, 1);
      this.sizes.splice(at, 1);
    }
  };
  function lanes(data, key) {
    const texts = data.text(key);
    const rooms = /* @__PURE__ */ new Map();
    const bottoms = new Float64Array(data.count);
    const take2 = (i) => {
      const text = texts[data.kind[i]];
      let room = rooms.get(text);
      if (!room) {
        room = new Room();
        rooms.set(text, room);
      }
      bottoms[i] = room.take(data.sizeOf(i));
    };
    for (let i = 0; i < data.facts.before; i++) take2(i);
    for (let k = 0; k < data.changes; k++) {
      const i = data.of[k];
      if (data.begins[k]) take2(i);
      else rooms.get(texts[data.kind[i]])?.give(bottoms[i], data.sizeOf(i));
    }
    const order = [...rooms].sort((a, b) => b[1].height - a[1].height);
    const starts = /* @__PURE__ */ new Map();
    const found = [];
    let height = 0;
    for (const [text, room] of order) {
      starts.set(text, height);
      const name = data.words.strings[text] || "not known";
      found.push({ name, bottom: height, height: room.height });
      height += room.height;
    }
    for (let i = 0; i < data.count; i++) bottoms[i] += starts.get(texts[data.kind[i]]) ?? 0;
    return { bottoms, lanes: found, height: Math.max(height, 1) };
  }

  // src/raster.ts
  function blank(width, height) {
    return { width, height, pixels: new Uint32Array(width * height) };
  }
  function edges(data, window2, width) {
    const found = new Int32Array(width + 1);
    const step = (window2.to - window2.from) / width;
    for (let x = 0; x <= width; x++) found[x] = data.changeAt(window2.axis, window2.from + x * step);
    return found;
  }
  function drawArea(data, window2, width, height, colors, hidden, least) {
    const edge = edges(data, window2, width);
    const count = colors.length;
    const levels = new Float64Array(width * count);
    let top = least;
    let lastChange = Number.NaN;
    for (let x = 0; x < width; x++) {
      const change = data.peakIn(edge[x], edge[x + 1]);
      const from = x * count;
      if (change === lastChange) {
        levels.copyWithin(from, from - count, from);
        continue;
      }
      lastChange = change;
      const own = data.levelsAt(change, levels.subarray(from, from + count));
      let total = 0;
      for (let c = 0; c < count; c++) {
        if (hidden[c]) own[c] = 0;
        total += own[c];
      }
      top = Math.max(top, total);
    }
    top = Math.max(top, 1) * 1.04;
    const picture = blank(width, height);
    for (let x = 0; x < width; x++) {
      let below = 0;
      let bottom = height;
      for (let c = 0; c < count; c++) {
        below += levels[x * count + c];
        const upper = Math.max(0, Math.round(height - below / top * height));
        for (let y = upper; y < bottom; y++) picture.pixels[y * width + x] = colors[c];
        bottom = Math.min(bottom, upper);
      }
    }
    return { picture, top };
  }
  function* drawBars(data, window2, width, height, bars) {
    const picture = blank(width, height);
    const { colorOf, fadedOf, skip, edge } = bars;
    const { kind } = data;
    yield* eachBar(data, window2, width, height, bars, (i, left, right, upper, bottom) => {
      const color = skip?.(i) ? fadedOf[kind[i]] : colorOf[kind[i]];
      if (color === 0) return;
      if (right - left === 1 && bottom - upper === 1) picture.pixels[upper * width + left] = color;
      else fillBar(picture, left, right, upper, bottom, color, edge);
    });
    return picture;
  }
  function* drawNumbers(data, width, height, bars) {
    const picture = blank(width, height);
    const window2 = { axis: "events", from: -1, to: data.changes };
    yield* eachBar(data, window2, width, height, bars, (i, left, right, upper, bottom) => {
      for (let y = upper; y < bottom; y++) {
        fillRow(picture.pixels, y * width + left, y * width + right, i + 1);
      }
    });
    return picture;
  }
  function* eachBar(data, window2, width, height, bars, place) {
    const perX = width / (window2.to - window2.from);
    const perByte = height / (bars.high - bars.low);
    const byTime = window2.axis === "time";
    const first = data.changeAt(window2.axis, window2.from);
    const last = data.changeAt(window2.axis, window2.to);
    const { start: start2, end, kind, size: size2, time, changes } = data;
    const { bottoms, unit, low: floor } = bars;
    const draw = (begin, stop) => {
      for (let i = begin; i < stop; i++) {
        const ended = end[i];
        if (ended <= first) continue;
        const low = (bottoms[i] * unit - floor) * perByte;
        const high = low + size2[kind[i]] * perByte;
        if (high < 0 || low > height) continue;
        const began = start2[i];
        const from = byTime && began >= 0 ? time[began] : began;
        const left = began < 0 ? 0 : Math.max(0, Math.floor((from - window2.from) * perX));
        let reach = width;
        if (ended < changes) {
          reach = Math.ceil(((byTime ? time[ended] : ended) - window2.from) * perX);
        }
        const right = Math.min(width, Math.max(reach, left + 1));
        const bottom = Math.min(height, Math.ceil(height - low));
        const upper = Math.max(0, Math.min(bottom - 1, Math.floor(height - high)));
        place(i, left, right, upper, bottom);
      }
    };
    let runs = 0;
    for (const [begin, stop] of data.runs(first, last)) {
      draw(begin, stop);
      if (++runs % 16 === 0) yield;
    }
  }
  function halved({ width, height, pixels }) {
    const half = blank(width >> 1, height);
    for (let at = 0; at < half.pixels.length; at++) {
      half.pixels[at] = Math.max(pixels[2 * at], pixels[2 * at + 1]);
    }
    return half;
  }
  function coarser(numbers, least) {
    const found = [numbers];
    while (found[found.length - 1].width >= 2 * least) found.push(halved(found[found.length - 1]));
    return found;
  }
  function drawFrom(numbers, data, window2, width, height, highest, bars) {
    const edge = edges(data, window2, width);
    const share2 = (edge[width] - edge[0]) / (data.changes + 1);
    const {
      width: wide,
      height: high,
      pixels
    } = numbers.findLast((each) => each.width * share2 >= width) ?? numbers[0];
    const columns2 = edge.map((change) => Math.floor((change + 1) * wide / (data.changes + 1)));
    const seen = new Uint32Array(width * height);
    let before = -1;
    for (let y = 0, to = 0; y < height; y++, to += width) {
      const bytes = bars.low + (height - y - 0.5) / height * (bars.high - bars.low);
      const row = Math.floor(high * (1 - bytes / highest));
      if (row < 0 || row >= high) continue;
      if (row === before) {
        seen.copyWithin(to, to - width, to);
        continue;
      }
      before = row;
      const from = row * wide;
      for (let x = 0; x < width; x++) {
        let at = from + Math.min(columns2[x], wide - 1);
        const stop = Math.max(from + columns2[x + 1], at + 1);
        let number = 0;
        for (; at < stop; at++) if (pixels[at] > number) number = pixels[at];
        seen[to + x] = number;
      }
    }
    return paintNumbers(seen, width, height, data, bars);
  }
  function paintNumbers(seen, width, height, data, bars) {
    const picture = blank(width, height);
    const { pixels } = picture;
    const { colorOf, fadedOf, skip, edge } = bars;
    const { kind } = data;
    let known = 0;
    let color = 0;
    for (let at = 0; at < seen.length; at++) {
      const number = seen[at];
      if (number === 0) continue;
      if (number !== known) {
        known = number;
        const i = number - 1;
        color = skip?.(i) ? fadedOf[kind[i]] : colorOf[kind[i]];
      }
      const inside = number === seen[at - width] && number === seen[at - 1];
      pixels[at] = !inside && color !== 0 && hasEdge(seen, at, width) ? edge : color;
    }
    return picture;
  }
  function hasEdge(seen, at, width) {
    const number = seen[at];
    const isTall = number === seen[at + width] && number === seen[at + 2 * width];
    const isTop = number !== seen[at - width] && number === seen[at + 3 * width];
    const isLeft = number !== seen[at - 1] && number === seen[at + 1] && number === seen[at + 2];
    return isTall && (isTop || isLeft);
  }
  var FEW = 24;
  function fillRow(pixels, from, to, color) {
    if (to - from > FEW) pixels.fill(color, from, to);
    else for (let at = from; at < to; at++) pixels[at] = color;
  }
  function fillBar(picture, left, right, upper, bottom, color, edge) {
    const { pixels, width } = picture;
    const edged = right - left > 1 && bottom - upper >= 4;
    const sided = edged && right - left >= 4;
    for (let y = upper; y < bottom; y++) {
      const row = y * width;
      fillRow(pixels, row + left, row + right, edged && y === upper ? edge : color);
      if (sided) pixels[row + left] = edge;
    }
  }
  function barAt(data, window2, bars, x, bytes, reachX, reachBytes) {
    const first = data.changeAt(window2.axis, x - reachX);
    const last = data.changeAt(window2.axis, x + reachX);
    let exact = -1;
    let near = -1;
    data.overlapping(first, last, (i) => {
      const kind = data.kind[i];
      if (bars.colorOf[kind] === 0) return;
      const low = bars.bottoms[i] * bars.unit;
      const high = low + data.size[kind];
      if (bytes >= low && bytes < high) exact = i;
      else if (bytes >= low - reachBytes && bytes < high + reachBytes) near = i;
    });
    return exact >= 0 ? exact : near;
  }

  // src/tree.ts
  var MOST_CHILDREN = 300;
  function passes(data, only, moment) {
    const peak = data.facts.peak_change;
    if (only === "peak") return (i) => data.alive(i, peak);
    if (only === "end") return (i) => data.end[i] >= data.changes;
    if (only === "saved") {
      const number = data.words.categories.indexOf("activations");
      return (i) => data.category[data.kind[i]] === number;
    }
    if (only === "grew") return (i) => data.start[i] > moment.from && data.alive(i, moment.at);
    return () => true;
  }
  function totals(data, moment, pass) {
    const bytes = new Float64Array(data.size.length);
    const counts = new Float64Array(data.size.length);
    const { at, from } = moment;
    const add = (i, times) => {
      const kind = data.kind[i];
      bytes[kind] += data.size[kind] * times;
      counts[kind] += Math.sign(times);
    };
    const held = (change, sign) => data.overlapping(change, change, (i) => {
      if (pass(i)) add(i, sign);
    });
    if (moment.measure === "held") held(at, 1);
    else if (moment.measure === "grew") {
      held(at, 1);
      held(from, -1);
    } else if (moment.measure === "bytetime") {
      const begin = data.xOf("time", from);
      const end = data.xOf("time", at);
      data.overlapping(from, at, (i) => {
        const left = Math.max(begin, data.xOf("time", data.start[i]));
        const right = Math.min(end, data.xOf("time", data.end[i]));
        if (pass(i) && right > left) add(i, (right - left) / 1e9);
      });
    } else {
      const wanted = moment.measure === "made" ? 1 : 0;
      for (let k = Math.max(from + 1, 0); k <= at; k++) {
        if (data.begins[k] === wanted && pass(data.of[k])) add(data.of[k], 1);
      }
    }
    return { bytes, counts };
  }
  function growing(name) {
    const node = { name, bytes: 0, count: 0, before: 0, children: [], others: 0, same: 0 };
    return { node, children: /* @__PURE__ */ new Map() };
  }
  var Tree = class {
    constructor(keys, compares = false) {
      this.keys = keys;
      this.compares = compares;
    }
    keys;
    compares;
    root = growing("");
    /** `sign` is -1 for the side of a comparison that was before. */
    add(data, found, sign = 0) {
      const texts = this.keys.map((key) => data.text(key));
      for (let kind = 0; kind < found.bytes.length; kind++) {
        if (found.counts[kind] === 0 && found.bytes[kind] === 0) continue;
        const path = texts.map((column) => data.words.strings[column[kind]]);
        this.addPath(path, found.bytes[kind], found.counts[kind], sign);
      }
    }
    addPath(path, bytes, count, sign = 0) {
      let at = this.root;
      const change = sign < 0 ? -1 : 1;
      for (const name of [null, ...path]) {
        if (name !== null) {
          let child = at.children.get(name);
          if (!child) {
            child = growing(name);
            at.children.set(name, child);
          }
          at = child;
        }
        at.node.bytes += change * bytes;
        at.node.count += change * count;
        if (sign < 0) at.node.before += bytes;
      }
    }
    finished() {
      return finish(this.root, this.compares);
    }
  };
  function finish(grown, compares) {
    const all = [...grown.children.values()];
    const listed = compares ? all.filter(changed) : all;
    listed.sort((a, b) => Math.abs(b.node.bytes) - Math.abs(a.node.bytes));
    const kept = listed.slice(0, MOST_CHILDREN);
    return {
      ...grown.node,
      children: kept.map((child) => finish(child, compares)),
      others: listed.length - kept.length,
      same: all.length - listed.length
    };
  }
  function changed({ node, children }) {
    return node.bytes !== 0 || node.count !== 0 || [...children.values()].some(changed);
  }

  // src/engine.ts
  var MOST_AT_ONCE = 15e4;
  var NUMBERS_WIDTH = 8192;
  var LEAST_WIDTH = 1024;
  var SLICE_MS = 12;
  var Engine = class {
    sets = [];
    columns = /* @__PURE__ */ new Map();
    kept = /* @__PURE__ */ new Map();
    numbers = /* @__PURE__ */ new Map();
    drawn = 0;
    // the latest picture that was asked for
    numbered = "";
    // the numbers that are being drawn
    async answer(what, about) {
      const how = this[what];
      return how.call(this, about);
    }
    /** A column begins to be opened when it arrives; `load` waits for all. */
    column({ id, bytes }) {
      this.columns.set(id, inflate(bytes));
      return null;
    }
    /** The document is sent as text, which is copied sooner than what it holds. */
    async load({ text }) {
      const { sets, ...words } = JSON.parse(text);
      for (const [i, facts] of sets.entries()) {
        const columns2 = {};
        for (const name of COLUMNS) {
          columns2[name] = await this.columns.get(`${i}-${name}`) ?? new Uint8Array(0);
        }
        this.sets.push(new Dataset(facts, words, columns2));
      }
      this.columns.clear();
      return this.sets.map((data) => placesOf(data));
    }
    /** Null where another picture was asked for meanwhile. */
    async draw(request) {
      const turn = ++this.drawn;
      const data = this.sets[request.set];
      const window2 = { axis: request.axis, from: request.from, to: request.to };
      const { categories, colors } = data.words;
      const hidden = categories.map((name) => request.hidden.includes(name));
      const palette = categories.map((name) => abgr(colors[name]));
      const { area, map } = request;
      const drawn = drawArea(data, window2, area.width, area.height, palette, hidden, area.least);
      const found = this.coloring(request);
      const bars = this.bars(request, map.low, map.high);
      const numbers = request.soon ? this.coarse(request, window2) : void 0;
      const picture = numbers ? drawFrom(numbers.pictures, data, window2, map.width, map.height, numbers.highest, bars) : await finish2(
        drawBars(data, window2, map.width, map.height, bars),
        () => turn === this.drawn
      );
      if (!picture) return null;
      this.prepare(request);
      return {
        area: drawn.picture.pixels,
        top: drawn.top,
        map: picture.pixels,
        legend: found.legend,
        lanes: this.lanes(request)?.lanes ?? [],
        highest: this.highest(request),
        exact: !numbers
      };
    }
    /** Numbers to draw from, where drawing each bar would take long and they are known. */
    coarse(request, window2) {
      const data = this.sets[request.set];
      const [first, last] = [window2.from, window2.to].map((x) => data.changeAt(window2.axis, x));
      const about = data.runs(first, last).reduce((bars, [begin, stop]) => bars + stop - begin, 0);
      return about > MOST_AT_ONCE ? this.numbers.get(numbersKey(request)) : void 0;
    }
    /** Draws the numbers beside other work, where there are many allocations; of two layouts at most. */
    async prepare(request) {
      const data = this.sets[request.set];
      const key = numbersKey(request);
      if (data.count <= MOST_AT_ONCE || this.numbers.has(key) || this.numbered === key) return;
      this.numbered = key;
      const highest = this.highest(request);
      const bars = this.bars(request, 0, highest);
      const drawing = drawNumbers(data, NUMBERS_WIDTH, request.map.height, bars);
      const picture = await finish2(drawing, () => this.numbered === key);
      if (!picture) return;
      this.numbered = "";
      const [oldest] = this.numbers.keys();
      if (this.numbers.size > 1) this.numbers.delete(oldest);
      this.numbers.set(key, { pictures: coarser(picture, LEAST_WIDTH), highest });
    }
    strip(about) {
      const data = this.sets[about.set];
      const [from, to] = data.bounds(about.axis);
      const palette = data.words.categories.map((name) => abgr(data.words.colors[name]));
      const none = palette.map(() => false);
      const window2 = { axis: about.axis, from, to };
      const drawn = drawArea(data, window2, about.width, about.height, palette, none, 0);
      return { area: drawn.picture.pixels, top: drawn.top };
    }
    moment(about) {
      const data = this.sets[about.set];
      const change = "x" in about ? data.changeAt(about.axis, about.x) : Math.max(-1, Math.min(data.changes - 1, about.change));
      return momentOf(data, about.axis, change);
    }
    peak(about) {
      const data = this.sets[about.set];
      const first = data.changeAt(about.axis, about.from);
      const last = data.changeAt(about.axis, about.to);
      return momentOf(data, about.axis, data.peakIn(first, last));
    }
    who(about) {
      const data = this.sets[about.set];
      const pass = passes(data, about.only, about.moment);
      const all = totals(data, about.moment, pass);
      const wanted = this.search(about);
      const found = { bytes: all.bytes.slice(), counts: all.counts.slice() };
      if (wanted) {
        for (let kind = 0; kind < wanted.length; kind++) {
          if (!wanted[kind]) found.bytes[kind] = found.counts[kind] = 0;
        }
      }
      const tree = new Tree(about.keys);
      tree.add(data, found);
      const shown = tree.finished();
      let rest = 0;
      if (about.moment.measure === "held" && about.only === "all") {
        rest = sum(data.levelsAt(about.moment.at)) - sum(all.bytes);
      }
      return {
        tree: shown,
        bytes: shown.bytes,
        count: shown.count,
        allBytes: sum(all.bytes) + rest,
        allCount: sum(all.counts),
        rest
      };
    }
    hit(about) {
      const data = this.sets[about.set];
      const window2 = { axis: about.axis, from: about.from, to: about.to };
      const bars = this.bars(about, 0, 1);
      const { x, bytes, reachX, reachBytes } = about;
      const found = barAt(data, window2, bars, x, bytes, reachX, reachBytes);
      return found < 0 ? null : this.bar({ set: about.set, allocation: found });
    }
    bar({ set, allocation }) {
      const data = this.sets[set];
      const kind = data.kind[allocation];
      const { strings, texts } = data.words;
      const start2 = data.start[allocation];
      const end = data.end[allocation];
      const alike = this.alike(set)[kind];
      return {
        allocation,
        row: data.rowOf(allocation),
        texts: Object.fromEntries(texts.map((name) => [name, strings[data.text(name)[kind]]])),
        bytes: data.size[kind],
        block: data.block[kind],
        start_ns: start2 < 0 ? null : data.time[start2],
        end_ns: end < data.changes ? data.time[end] : null,
        start: start2,
        end,
        address: addressOf(data.facts, data.address[allocation]),
        atPeak: data.alive(allocation, data.facts.peak_change),
        alike,
        bottoms: this.bottoms(set, allocation)
      };
    }
    compare(about) {
      const tree = new Tree(about.keys, true);
      for (const [side, sign] of [
        [about.before, -1],
        [about.after, 1]
      ]) {
        const data = this.sets[side.set];
        const moment = { measure: "held", at: side.change, from: -1 };
        tree.add(
          data,
          totals(data, moment, () => true),
          sign
        );
      }
      return tree.finished();
    }
    /** The largest bars that are alive at the moment and found: a table behind the picture. */
    rows(about) {
      const data = this.sets[about.set];
      const pass = passes(data, about.only, about.moment);
      const wanted = this.search(about);
      const found = [];
      data.overlapping(about.moment.at, about.moment.at, (i) => {
        if (pass(i) && (!wanted || wanted[data.kind[i]])) found.push(i);
      });
      found.sort((a, b) => data.sizeOf(b) - data.sizeOf(a));
      return found.slice(0, about.most).map((allocation) => this.bar({ set: about.set, allocation }));
    }
    // -------------------------------------------------------------- what is worth keeping
    once(key, make) {
      if (!this.kept.has(key)) {
        if (this.kept.size > 24) this.kept.clear();
        this.kept.set(key, make());
      }
      return this.kept.get(key);
    }
    /** How many allocations each kind has. */
    alike(set) {
      return this.once(`alike ${set}`, () => {
        const data = this.sets[set];
        const counts = new Uint32Array(data.size.length);
        for (let i = 0; i < data.count; i++) counts[data.kind[i]]++;
        return counts;
      });
    }
    coloring(look) {
      return this.once(
        `color ${look.set} ${look.color}`,
        () => coloring(this.sets[look.set], look.color)
      );
    }
    search(look) {
      return this.once(
        `search ${look.set} ${look.search}`,
        () => search(this.sets[look.set], look.search)
      );
    }
    lanes(look) {
      const { layout, set } = look;
      if (layout === "address") return null;
      return this.once(`lanes ${set} ${layout}`, () => lanes(this.sets[set], layout));
    }
    bottoms(set, allocation) {
      const data = this.sets[set];
      const found = {
        address: data.address[allocation] * data.facts.address_unit
      };
      for (const layout of ["category", "module"]) {
        const known = this.kept.get(`lanes ${set} ${layout}`);
        if (known) found[layout] = known.bottoms[allocation];
      }
      return found;
    }
    highest(look) {
      const data = this.sets[look.set];
      return this.lanes(look)?.height ?? data.highest * data.facts.address_unit;
    }
    bars(look, low, high) {
      const data = this.sets[look.set];
      const packed = this.lanes(look);
      const { ofKind, fadedOf } = this.kindColors(look);
      const pass = passes(data, look.only, look.moment);
      return {
        bottoms: packed ? packed.bottoms : data.address,
        unit: packed ? 1 : data.facts.address_unit,
        low,
        high,
        colorOf: ofKind,
        fadedOf,
        skip: look.only === "all" ? void 0 : (i) => !pass(i),
        edge: look.dark ? 4279637526 : 4294967295
      };
    }
    kindColors(look) {
      const { set, color, dark } = look;
      const key = `kinds ${set} ${color} ${dark} ${look.hidden} ${look.search}`;
      return this.once(key, () => {
        const data = this.sets[set];
        const wanted = this.search(look);
        const hidden = data.words.categories.map((name) => look.hidden.includes(name));
        const plain = this.coloring(look).ofKind;
        const fadedOf = Uint32Array.from(plain, (c) => faded(c, dark));
        const ofKind = Uint32Array.from(plain, (c, kind) => {
          if (hidden[data.category[kind]]) return 0;
          return wanted && !wanted[kind] ? fadedOf[kind] : c;
        });
        return { ofKind, fadedOf };
      });
    }
  };
  async function finish2(work, wanted) {
    let until = performance.now() + SLICE_MS;
    for (; ; ) {
      const { done, value } = work.next();
      if (done) return value;
      if (performance.now() < until) continue;
      await pause();
      if (!wanted()) return null;
      until = performance.now() + SLICE_MS;
    }
  }
  function pause() {
    return new Promise((done) => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = () => done();
      port2.postMessage(null);
    });
  }
  var numbersKey = ({ set, layout, map }) => `${set} ${layout} ${map.height}`;
  function momentOf(data, axis, change) {
    const levels = Array.from(data.levelsAt(change));
    return {
      change,
      x: data.xOf(axis, change),
      time_ns: data.xOf("time", change),
      levels,
      bytes: sum(levels)
    };
  }
  function placesOf(data) {
    const { facts } = data;
    const at = (time) => data.changeAt("time", time);
    const ends = facts.steps.map((step) => step.last_change);
    return {
      steps: ends.map((end, i) => [i === 0 ? -1 : ends[i - 1], end]),
      phases: facts.phases.map(([, begin, end]) => [at(begin), at(end)]),
      modules: facts.modules.map(([, , begin, end]) => [at(begin), at(end)]),
      reserved: facts.reserved.times_ns.map(at),
      use: facts.device_use.map((use) => at(use.time_ns)),
      failures: facts.failures.map((failure) => at(failure.time_ns))
    };
  }
  function addressOf(facts, place) {
    const offset = place * facts.address_unit;
    let found = facts.regions[0];
    for (const region of facts.regions) if (region[1] <= offset) found = region;
    return found ? `0x${(found[0] + offset - found[1]).toString(16)}` : "";
  }

  // src/channel.ts
  var LONGEST_START_MS = 5e3;
  function serve(scope) {
    const engine = new Engine();
    scope.onmessage = async (event) => {
      const { number, what, about } = event.data;
      try {
        const answer = await engine.answer(what, about);
        scope.postMessage({ number, answer }, buffersOf(answer));
      } catch (problem) {
        scope.postMessage({ number, problem: String(problem) });
      }
    };
    scope.postMessage("ready");
  }
  function buffersOf(message) {
    const values = message && typeof message === "object" ? Object.values(message) : [];
    return values.filter(ArrayBuffer.isView).map((value) => value.buffer);
  }
  async function open(script) {
    try {
      return await inWorker(script);
    } catch {
      const engine = new Engine();
      return { where: "page", ask: (what, about) => engine.answer(what, about) };
    }
  }
  async function inWorker(script) {
    const address = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
    const worker = new Worker(address);
    const waiting = /* @__PURE__ */ new Map();
    let asked = 0;
    await new Promise((ready, failed) => {
      worker.onmessage = () => ready();
      worker.onerror = () => failed(new Error("no worker"));
      setTimeout(() => failed(new Error("no worker")), LONGEST_START_MS);
    });
    URL.revokeObjectURL(address);
    worker.onmessage = (event) => {
      const { number, answer, problem } = event.data;
      const one = waiting.get(number);
      waiting.delete(number);
      if (problem === void 0) one?.done(answer);
      else one?.failed(new Error(problem));
    };
    return {
      where: "worker",
      ask: (what, about) => new Promise((done, failed) => {
        const number = ++asked;
        waiting.set(number, { done, failed });
        worker.postMessage({ number, what, about }, buffersOf(about));
      })
    };
  }

  // src/main.ts
  function take(name) {
    const element = document.getElementById(`data-${name}`);
    const text = element?.textContent ?? "";
    element?.remove();
    return text;
  }
  async function columns(doc, channel) {
    const left = new Set(doc.sets.flatMap((_, i) => COLUMNS.map((name) => `${i}-${name}`)));
    const look = (all) => {
      for (const id of left) {
        if (!all && !document.getElementById(`data-${id}`)?.nextSibling) continue;
        left.delete(id);
        channel.ask("column", { id, bytes: fromBase64(take(id)) });
      }
    };
    if (document.readyState === "loading") {
      const watch = new MutationObserver(() => look(false));
      watch.observe(document.body, { childList: true });
      await new Promise((done) => document.addEventListener("DOMContentLoaded", done));
      watch.disconnect();
    }
    look(true);
  }
  async function start(root, script) {
    const text = take("document");
    const opened = open(script);
    const doc = JSON.parse(text);
    const channel = await opened;
    await columns(doc, channel);
    const places = await channel.ask("load", { text });
    const app = new App(doc, channel, places, root);
    await app.start();
    document.documentElement.dataset.ready = channel.where;
    performance.mark("interactive");
  }
  if (typeof document === "undefined") {
    serve(self);
  } else {
    const root = document.getElementById("app");
    const script = document.getElementById("viewer")?.textContent ?? "";
    if (root) {
      start(root, script).catch((problem) => {
        root.textContent = `The pictures cannot be drawn: ${problem}. The table below is whole.`;
        document.documentElement.dataset.ready = "failed";
      });
    }
  }
})();
