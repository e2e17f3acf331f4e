// Where steps, phases and other things of the trace are on the axis of changes.

import type { Dataset } from "./dataset";

/** What the page's own lines and bands need to be drawn on the axis of changes. */
export interface Places {
  steps: [number, number][];
  phases: [number, number][];
  modules: [number, number][];
  reserved: number[];
  use: number[];
  failures: number[];
  leaks: { change: number; time_ns: number }[]; // where something began that a step left behind
}

export function placesOf(data: Dataset): Places {
  const { facts } = data;
  const at = (time: number) => data.changeAt("time", time);
  const ends = facts.steps.map((step) => step.last_change);
  return {
    steps: ends.map((end, i) => [i === 0 ? -1 : ends[i - 1], end]),
    phases: facts.phases.map(([, begin, end]) => [at(begin), at(end)]),
    modules: facts.modules.map(([, , begin, end]) => [at(begin), at(end)]),
    reserved: facts.reserved.times_ns.map(at),
    use: facts.device_use.map((use) => at(use.time_ns)),
    failures: facts.failures.map((failure) => at(failure.time_ns)),
    leaks: leaksOf(data),
  };
}

const MOST_LEAKS = 2000;

function leaksOf(data: Dataset): Places["leaks"] {
  let growth = 0;
  data.facts.findings?.forEach((row, i) => {
    if (row.kind === "growth" && row.at !== null) growth |= 1 << i;
  });
  const found: Places["leaks"] = [];
  if (growth === 0) return found;
  for (let i = 0; i < data.count && found.length < MOST_LEAKS; i++) {
    const change = data.start[i];
    if (data.finding[i] & growth && change >= 0) found.push({ change, time_ns: data.time[change] });
  }
  return found;
}
