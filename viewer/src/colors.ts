// Which colour a kind has. Colours are those that people who see fewer of them can tell apart.

import { type Dataset, uint32 } from "./dataset";
import { exactly, wordOf } from "./folded";
import { groups, type Modules } from "./lanes";

export type ColorBy = "category" | "phase" | "module" | "op" | "line" | "size";
export const COLOR_BY: ColorBy[] = ["category", "phase", "module", "op", "line", "size"];

const MANY = ["#4477aa", "#ddaa33", "#5a9e4b", "#aa4499", "#44aaaa", "#cc6677", "#999933"];
const MORE = ["#882255", "#66aadd", "#997700", "#8877cc"];
const PALETTE = [...MANY, ...MORE];
const OTHERS = "#8899aa";
const SIZES = [
  "#3b4994",
  "#3f73a6",
  "#4199a9",
  "#53b99a",
  "#93cf7d",
  "#d9db5f",
  "#f2b447",
  "#e4713d",
];
const PHASES = ["#8899aa", "#999933", "#4477aa", "#44aaaa", "#aa4499", "#ddaa33"];

export interface LegendEntry {
  name: string;
  color: string;
  word: string; // of a search for it; "": there is none
}

export interface Coloring {
  ofKind: Uint32Array; // as ImageData has them: alpha, blue, green, red
  legend: LegendEntry[];
}

export function abgr(color: string): number {
  const rgb = Number.parseInt(color.slice(1), 16);
  return (0xff000000 | ((rgb & 0xff) << 16) | (rgb & 0xff00) | (rgb >> 16)) >>> 0;
}

/** Towards the page's ground: what a search does not find stays visible, and does not distract. */
export function faded(color: number, dark: boolean): number {
  const ground = dark ? 0x24 : 0xee;
  let mixed = 0xff000000;
  for (let shift = 0; shift < 24; shift += 8) {
    mixed |= Math.round(((color >> shift) & 0xff) * 0.14 + ground * 0.86) << shift;
  }
  return mixed >>> 0;
}

export function coloring(data: Dataset, by: ColorBy, modules: Modules): Coloring {
  if (by === "category") return byCategory(data);
  if (by === "size") return bySize(data);
  const fixed = (name: string) => PHASES[data.words.phases.indexOf(name)];
  return byText(data, by, modules, by === "phase" ? fixed : undefined);
}

function byCategory(data: Dataset): Coloring {
  const { categories, colors } = data.words;
  const palette = categories.map((name) => abgr(colors[name]));
  const present = new Set(data.category);
  return {
    ofKind: uint32(data.category.length, (kind) => palette[data.category[kind]]),
    legend: categories
      .filter((_, i) => present.has(i))
      .map((name) => ({ name, color: colors[name], word: "" })),
  };
}

function bySize(data: Dataset): Coloring {
  const palette = SIZES.map(abgr);
  const rank = (bytes: number) =>
    Math.max(0, Math.min(SIZES.length - 1, Math.floor(Math.log2(Math.max(bytes, 1)) / 4) - 1));
  const names = ["256 B", "4 KiB", "64 KiB", "1 MiB", "16 MiB", "256 MiB", "4 GiB"];
  return {
    ofKind: uint32(data.size.length, (kind) => palette[rank(data.size[kind])]),
    legend: SIZES.map((color, i) => ({
      name: i < names.length ? `below ${names[i]}` : "4 GiB and more",
      color,
      word: "",
    })),
  };
}

/** Those who hold most at the peak have a colour each; all others share one. */
function byText(
  data: Dataset,
  key: string,
  modules: Modules,
  fixed: ((name: string) => string | undefined) | undefined,
): Coloring {
  const [of, names] = groups(data, key, modules);
  const held = new Float64Array(names.length);
  for (let i = 0; i < data.count; i++) {
    const kind = data.kind[i];
    held[of[kind]] += data.size[kind] * (data.alive(i, data.facts.peak_change) ? 1 : 1e-6);
  }
  const order = names.map((_, group) => group).sort((a, b) => held[b] - held[a]);
  const color = new Map<number, string>();
  for (const group of order) {
    const own = fixed ? fixed(names[group]) : PALETTE[color.size];
    if (own && names[group]) color.set(group, own);
    if (!fixed && color.size >= PALETTE.length) break;
  }
  const others = abgr(OTHERS);
  const colors = names.map((_, group) => abgr(color.get(group) ?? OTHERS));
  const words = wordsOfGroups(data, key, modules, of);
  const legend = [...color].map(([group, c]) => ({
    name: names[group],
    color: c,
    word: words.get(group) ?? "",
  }));
  if (order.length > color.size) legend.push({ name: "others", color: OTHERS, word: "" });
  return { ofKind: uint32(of.length, (kind) => colors[of[kind]] ?? others), legend };
}

/** Of each group the search for exactly it. */
function wordsOfGroups(
  data: Dataset,
  key: string,
  modules: Modules,
  of: Uint32Array,
): Map<number, string> {
  const found = new Map<number, string>();
  const texts = data.text(key);
  of.forEach((group, kind) => {
    if (found.has(group)) return;
    const said = data.words.strings[texts[kind]];
    found.set(group, key === "module" && said ? wordOf(modules(said)) : exactly(key, said));
  });
  return found;
}
