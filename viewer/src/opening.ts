// What is seen first, and for what the pictures leave room.

import { isMostlyIdle } from "./books";
import type { Facts } from "./document";
import type { Room, State } from "./state";

/**
 * What is seen first: the peak's step and around it, because a whole run is too much to begin with.
 * If memory grows from step to step, it is the whole run, which shows the stairs. By events where
 * idle time would squeeze everything that happened.
 */
export function opening(facts: Facts): Pick<State, "axis" | "from" | "to"> {
  const axis = isMostlyIdle(facts) ? "events" : "time";
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
export function leastTop(facts: Facts, room: Room): number {
  const most = mostReserved(facts);
  return room === "device" || !isFarAbove(facts) ? Math.max(most, mostUsed(facts)) : most;
}

const mostReserved = ({ reserved }: Facts) =>
  reserved.bytes.reduce((most, bytes) => Math.max(most, bytes), 0);
export const mostUsed = ({ device_use }: Facts) =>
  device_use.reduce((most, use) => Math.max(most, use.bytes), 0);
export const isFarAbove = (facts: Facts) =>
  mostUsed(facts) > 2 * Math.max(mostReserved(facts), facts.peak.bytes);
