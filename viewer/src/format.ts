// Numbers as people read them; sizes and times exactly as Python's table writes them.

export function sizeText(amount: number): string {
  if (amount < 0) return `-${sizeText(-amount)}`;
  if (amount < 1000) return `${Math.round(amount)} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let power = 1;
  while (amount / 1024 ** power >= 999.5 && power < units.length) power++;
  return `${threeDigits(amount / 1024 ** power)} ${units[power - 1]}`;
}

export const signed = (amount: number) => (amount > 0 ? `+${sizeText(amount)}` : sizeText(amount));

const UNITS: [name: string, ns: number][] = [
  ["s", 1e9],
  ["ms", 1e6],
  ["us", 1e3],
];

export function timeText(ns: number): string {
  if (ns < 0) return `-${timeText(-ns)}`;
  const unit = UNITS.find(([, size]) => ns / size >= 0.9995);
  return unit ? `${threeDigits(ns / unit[1])} ${unit[0]}` : `${Math.round(ns)} ns`;
}

/** A time beside others that are a step apart: with as many digits as tell it from them. */
export function tickText(ns: number, step: number): string {
  const [name, size] = UNITS.find(([, unit]) => Math.abs(ns) / unit >= 0.9995) ?? ["ns", 1];
  const digits = Math.ceil(-Math.log10(Math.max(step, 1) / size) - 1e-9);
  const usual = timeText(ns);
  const decimals = usual.split(" ")[0].split(".")[1]?.length ?? 0;
  return digits > decimals ? `${(ns / size).toFixed(Math.min(digits, 9))} ${name}` : usual;
}

/** Some times in the unit of the longest. */
export function timesText(times: number[]): string {
  const [name, size] = UNITS.find(([, ns]) => Math.max(...times) / ns >= 0.9995) ?? ["ns", 1];
  return `${times.map((ns) => threeDigits(ns / size)).join(" / ")} ${name}`;
}

function threeDigits(value: number): string {
  return value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
}

export const countText = (count: number) => count.toLocaleString("en");
export const exactText = (bytes: number) => `${countText(bytes)} bytes`;
export const shareText = (part: number, whole: number) =>
  whole ? `${((100 * part) / whole).toFixed(1)}%` : "";

/** The parts of a sentence; every second one stood in backticks. */
export const codeParts = (text: string) =>
  text.split(/`([^`]+)`/).map((part, i): [text: string, isCode: boolean] => [part, i % 2 === 1]);

/** Round places between two numbers, for the marks of an axis. */
export function ticks(from: number, to: number, about: number, binary = false): number[] {
  const rough = (to - from) / about;
  if (!(rough > 0)) return [];
  const base = binary ? 2 : 10;
  const power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const factors = binary ? [1, 2] : [1, 2, 5, 10];
  const step = power * (factors.find((factor) => factor * power >= rough) ?? base);
  const found: number[] = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}

/** A difference of allocations: "3 more allocations". */
export function moreText(count: number): string {
  const many = Math.abs(count);
  return `${countText(many)} ${count < 0 ? "fewer" : "more"} allocation${many === 1 ? "" : "s"}`;
}
