// Pictures as pixels. A million bars are too many for a canvas' own rectangles, and few for this.

import type { Axis, Dataset } from "./dataset";

export interface Picture {
  width: number;
  height: number;
  pixels: Uint32Array<ArrayBuffer>;
}

export interface Window {
  axis: Axis;
  from: number; // on the axis
  to: number;
}

export function blank(width: number, height: number): Picture {
  return { width, height, pixels: new Uint32Array(width * height) };
}

/** The change that holds at the left edge of each column of pixels, and at the right of the last. */
export function edges(data: Dataset, window: Window, width: number): Int32Array {
  const found = new Int32Array(width + 1);
  const step = (window.to - window.from) / width;
  for (let x = 0; x <= width; x++) found[x] = data.changeAt(window.axis, window.from + x * step);
  return found;
}

export interface Area {
  picture: Picture;
  top: number; // bytes at the upper edge
}

/** Categories on top of each other; each column of pixels is its highest moment, as it was. */
export function drawArea(
  data: Dataset,
  window: Window,
  width: number,
  height: number,
  colors: number[],
  hidden: boolean[],
  least: number,
): Area {
  const edge = edges(data, window, width);
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
      const upper = Math.max(0, Math.round(height - (below / top) * height));
      for (let y = upper; y < bottom; y++) picture.pixels[y * width + x] = colors[c];
      bottom = Math.min(bottom, upper);
    }
  }
  return { picture, top };
}

export interface Bars {
  bottoms: ArrayLike<number>; // per allocation, in units
  unit: number; // bytes
  low: number; // bytes at the lower edge
  high: number; // and at the upper one
  colorOf: Uint32Array; // per kind; 0: not drawn
  skip?: ((allocation: number) => boolean) | undefined; // drawn faded
  fadedOf: Uint32Array; // per kind
  edge: number; // the colour of bars' edges
}

/** Every allocation as a bar: from left to right its life, from below to above its bytes. */
export function drawBars(
  data: Dataset,
  window: Window,
  width: number,
  height: number,
  bars: Bars,
): Picture {
  const picture = blank(width, height);
  const perX = width / (window.to - window.from);
  const perByte = height / (bars.high - bars.low);
  const byTime = window.axis === "time";
  const first = data.changeAt(window.axis, window.from);
  const last = data.changeAt(window.axis, window.to);
  const { end, kind: kinds, size, changes } = data;
  const begins = byTime ? data.startTime : data.start;
  const ends = byTime ? data.endTime : end;
  const { bottoms, unit, low: floor, colorOf, fadedOf, skip, edge } = bars;
  // As plain a loop as can be: it runs a million times a picture.
  data.runs(first, last, (begin, stop) => {
    for (let i = begin; i < stop; i++) {
      const ended = end[i];
      if (ended <= first) continue;
      const kind = kinds[i];
      let color = colorOf[kind];
      if (color === 0) continue;
      const low = (bottoms[i] * unit - floor) * perByte;
      const high = low + size[kind] * perByte;
      if (high < 0 || low > height) continue;
      const left = Math.max(0, Math.floor((begins[i] - window.from) * perX));
      const reach = ended >= changes ? width : Math.ceil((ends[i] - window.from) * perX);
      const right = Math.min(width, Math.max(reach, left + 1));
      const bottom = Math.min(height, Math.ceil(height - low));
      const upper = Math.max(0, Math.min(bottom - 1, Math.floor(height - high)));
      if (skip?.(i)) color = fadedOf[kind];
      if (right - left === 1 && bottom - upper === 1) picture.pixels[upper * width + left] = color;
      else fillBar(picture, left, right, upper, bottom, color, edge);
    }
  });
  return picture;
}

const FEW = 24; // pixels that are sooner set one by one

function fillRow(pixels: Uint32Array, from: number, to: number, color: number): void {
  if (to - from > FEW) pixels.fill(color, from, to);
  else for (let at = from; at < to; at++) pixels[at] = color;
}

function fillBar(
  picture: Picture,
  left: number,
  right: number,
  upper: number,
  bottom: number,
  color: number,
  edge: number,
): void {
  const { pixels, width } = picture;
  // Where there is room, an edge tells a bar from the next one.
  const edged = right - left > 1 && bottom - upper >= 4;
  const sided = edged && right - left >= 4;
  for (let y = upper; y < bottom; y++) {
    const row = y * width;
    fillRow(pixels, row + left, row + right, edged && y === upper ? edge : color);
    if (sided) pixels[row + left] = edge;
  }
}

/** The bar that is seen at a place: of those there, the one that was drawn last. */
export function barAt(
  data: Dataset,
  window: Window,
  bars: Bars,
  x: number,
  bytes: number,
  reachX: number,
  reachBytes: number,
): number {
  const first = data.changeAt(window.axis, x - reachX);
  const last = data.changeAt(window.axis, x + reachX);
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
