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

/** Where bars are, without how they look. */
type Geometry = Pick<Bars, "bottoms" | "unit" | "low" | "high">;

/** Every allocation as a bar: from left to right its life, from below to above its bytes. */
export function* drawBars(
  data: Dataset,
  window: Window,
  width: number,
  height: number,
  bars: Bars,
): Generator<undefined, Picture> {
  const picture = blank(width, height);
  const { colorOf, fadedOf, skip, edge } = bars;
  const { kind } = data;
  yield* eachBar(data, window, width, height, bars, (i, left, right, upper, bottom) => {
    const color = skip?.(i) ? fadedOf[kind[i]] : colorOf[kind[i]];
    if (color === 0) return;
    if (right - left === 1 && bottom - upper === 1) picture.pixels[upper * width + left] = color;
    else fillBar(picture, left, right, upper, bottom, color, edge);
  });
  return picture;
}

/** The whole trace by changes, very wide: each pixel is its allocation's number plus 1. */
export function* drawNumbers(
  data: Dataset,
  width: number,
  height: number,
  bars: Geometry,
): Generator<undefined, Picture> {
  const picture = blank(width, height);
  const window: Window = { axis: "events", from: -1, to: data.changes };
  yield* eachBar(data, window, width, height, bars, (i, left, right, upper, bottom) => {
    for (let y = upper; y < bottom; y++) {
      fillRow(picture.pixels, y * width + left, y * width + right, i + 1);
    }
  });
  return picture;
}

type Place = (i: number, left: number, right: number, upper: number, bottom: number) => void;

/** Gives the pixels of each bar of the window in turn. After some thousands it can be left. */
function* eachBar(
  data: Dataset,
  window: Window,
  width: number,
  height: number,
  bars: Geometry,
  place: Place,
): Generator<undefined, void> {
  const perX = width / (window.to - window.from);
  const perByte = height / (bars.high - bars.low);
  const byTime = window.axis === "time";
  const first = data.changeAt(window.axis, window.from);
  const last = data.changeAt(window.axis, window.to);
  const { start, end, kind, size, time, changes } = data;
  const { bottoms, unit, low: floor } = bars;
  // As plain a loop as can be: it runs a million times a picture.
  const draw = (begin: number, stop: number) => {
    for (let i = begin; i < stop; i++) {
      const ended = end[i];
      if (ended <= first) continue;
      const low = (bottoms[i] * unit - floor) * perByte;
      const high = low + size[kind[i]] * perByte;
      if (high < 0 || low > height) continue;
      const began = start[i];
      const from = byTime && began >= 0 ? time[began] : began;
      const left = began < 0 ? 0 : Math.max(0, Math.floor((from - window.from) * perX));
      let reach = width;
      if (ended < changes) {
        reach = Math.ceil(((byTime ? time[ended] : ended) - window.from) * perX);
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

/** Half as wide: of each two pixels the one that was drawn last. */
function halved({ width, height, pixels }: Picture): Picture {
  const half = blank(width >> 1, height);
  for (let at = 0; at < half.pixels.length; at++) {
    half.pixels[at] = Math.max(pixels[2 * at], pixels[2 * at + 1]);
  }
  return half;
}

/** The numbers, and the same in ever fewer columns. */
export function coarser(numbers: Picture, least: number): Picture[] {
  const found = [numbers];
  while (found[found.length - 1].width >= 2 * least) found.push(halved(found[found.length - 1]));
  return found;
}

/** Of pictures of the whole trace the widest with no more columns for the window than pixels. */
export function fitting(
  pictures: Picture[],
  data: Dataset,
  window: Window,
  width: number,
): Picture {
  const [first, last] = [window.from, window.to].map((x) => data.changeAt(window.axis, x));
  const share = (last - first) / (data.changes + 1);
  return pictures.find((each) => each.width * share <= width) ?? pictures[pictures.length - 1];
}

/** Numbers of allocations as their colours. */
export function* paintNumbers(
  numbers: Picture,
  data: Dataset,
  bars: Bars,
): Generator<undefined, Picture> {
  const { width, height, pixels: seen } = numbers;
  const picture = blank(width, height);
  const { pixels } = picture;
  const { colorOf, fadedOf, skip, edge } = bars;
  const { kind } = data;
  let known = 0;
  let color = 0;
  const paint = (from: number, to: number) => {
    for (let at = from; at < to; at++) {
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
  };
  for (let y = 0; y < height; y += 16) {
    paint(y * width, Math.min(y + 16, height) * width);
    yield;
  }
  return picture;
}

/**
 * The picture while somebody moves: each pixel is the one at its place in a picture of the whole
 * trace. It costs pixels, however many allocations there are.
 */
export function drawFrom(
  whole: Picture,
  data: Dataset,
  window: Window,
  width: number,
  height: number,
  highest: number, // bytes at the upper edge of the whole
  { low, high }: { low: number; high: number },
): Picture {
  const picture = blank(width, height);
  const { width: wide, height: rows, pixels } = whole;
  const perChange = wide / (data.changes + 1);
  const columns = edges(data, window, width).map((change) =>
    Math.min(Math.floor((change + 1) * perChange), wide - 1),
  );
  let before = -1;
  for (let y = 0, to = 0; y < height; y++, to += width) {
    const bytes = low + ((height - y - 0.5) / height) * (high - low);
    const row = Math.floor(rows * (1 - bytes / highest));
    if (row < 0 || row >= rows) continue;
    if (row === before) picture.pixels.copyWithin(to, to - width, to);
    else {
      const from = row * wide;
      for (let x = 0; x < width; x++) picture.pixels[to + x] = pixels[from + columns[x]];
    }
    before = row;
  }
  return picture;
}

/** Bars with room for an edge have one, as when each is drawn. */
function hasEdge(seen: Uint32Array, at: number, width: number): boolean {
  const number = seen[at];
  const tall = number === seen[at + width] && number === seen[at + 2 * width];
  const top = number !== seen[at - width] && number === seen[at + 3 * width];
  const isLeft = number !== seen[at - 1] && number === seen[at + 1] && number === seen[at + 2];
  return tall && (top || isLeft);
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
