// Tables that need no data but the document's: steps, ledger, parameters, findings, health, costs.

import type { Change, Cost, Facts, Finding, Ledger } from "./document";
import { h, prose } from "./dom";
import { countText, exactText, shareText, signed, sizeText, timesText, timeText } from "./format";

type Cell = string | Node;

const isWords = (text: string) => /^[a-z.([]/i.test(text) || /[a-z]{3}.*, /.test(text);
const hasWords = (cell: Cell | undefined) => typeof cell === "string" && isWords(cell);

/** A long path breaks where its parts end, not within a word. */
function breakable(text: string): Cell[] {
  return text.split(/(?<=[./:])(?=\w)/).flatMap((part, i) => (i ? [h("wbr"), part] : [part]));
}

export function table(caption: string, heads: Cell[], rows: Cell[][], total?: Cell[]): HTMLElement {
  const isText = heads.map((_, i) => rows.some((row) => hasWords(row[i])));
  const cell = (inside: Cell, i: number) => {
    const parts = typeof inside === "string" ? breakable(inside) : [inside];
    return h("td", { class: isText[i + 1] && "words" }, ...parts);
  };
  const line = ([first, ...others]: Cell[]) =>
    h("tr", {}, h("th", { scope: "row" }, first), ...others.map(cell));
  const head = (inside: Cell, i: number) =>
    h("th", { scope: "col", class: isText[i] && "words" }, inside);
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, ...heads.map(head))),
      h("tbody", {}, ...rows.map(line)),
      total ? h("tfoot", {}, line(total)) : null,
    ),
  );
}

export function size(bytes: number | null): HTMLElement {
  if (bytes === null) return h("span", {}, "not known");
  return h("span", { title: exactText(bytes), "data-bytes": bytes }, sizeText(bytes));
}

export interface StepActions {
  go: (step: number) => void;
  compare: (step: number) => void;
}

export function steps(facts: Facts, actions: StepActions): HTMLElement {
  if (facts.steps.length === 0) return h("p", {}, "No training step was seen.");
  const most = Math.max(...facts.steps.map((row) => row.peak_bytes), 1);
  const rows = facts.steps.map((row, i) => [
    h("button", { click: () => actions.go(i) }, `step ${facts.first_step + row.step}`),
    size(row.peak_bytes),
    bar(0, row.peak_bytes / most),
    i > 0 ? h("span", {}, signed(row.peak_bytes - facts.steps[i - 1].peak_bytes)) : "",
    i > 0
      ? h(
          "button",
          {
            click: () => actions.compare(i),
            "aria-label": `what changed in step ${facts.first_step + row.step}`,
          },
          "what changed",
        )
      : "",
    h("span", { title: exactText(row.growth_bytes) }, signed(row.growth_bytes)),
    countText(row.allocations),
    timesText([
      row.device_forward_ns ?? row.forward_ns,
      row.device_backward_ns ?? row.backward_ns,
      row.device_optimizer_ns ?? row.optimizer_ns,
    ]),
  ]);
  const heads = [
    ...["step", "peak", "picture", "against the one before", "why", "left behind"],
    ...["allocations", "forward / backward / optimizer"],
  ];
  return h("div", { class: "steps narrow" }, table("Steps", heads, rows));
}

/** A part of a whole, from `begin` on. */
function bar(begin: number, share: number): HTMLElement {
  const part = h("span", { class: "bar", "aria-hidden": "true" });
  part.style.marginLeft = `${100 * begin}%`;
  part.style.width = `${100 * share}%`;
  return h("span", { class: "waterfall" }, part);
}

/** Each row's bar begins where the one before it on the same level ends. */
export function ledger(found: Ledger): HTMLElement {
  const whole = Math.max(...found.rows.map((row) => row.bytes ?? 0), 1);
  const reached: number[] = [0];
  const rows = found.rows.map((row) => {
    const begin = reached[row.level] ?? reached[row.level - 1] ?? 0;
    const bytes = row.bytes ?? 0;
    reached[row.level] = begin + bytes;
    reached.length = row.level + 1;
    reached[row.level + 1] = begin;
    const name = h("span", {}, row.name);
    name.style.paddingLeft = `${row.level}em`;
    const how = row.moment === found.at ? row.known_by : `${row.known_by}, ${row.moment}`;
    return [name, size(row.bytes), bar(begin / whole, Math.max(bytes, 0) / whole), how];
  });
  return h(
    "div",
    { class: "narrow" },
    table(`Ledger at the ${found.at}`, ["what", "bytes", "picture", "known by"], rows),
    h("p", {}, prose([sentence(found.verdict), ...found.notes].join(" "))),
  );
}

export function parameters(facts: Facts): HTMLElement | null {
  if (!facts.per_parameter || !facts.parameters) return null;
  const figure = (value: number | null) => (value === null ? "" : value.toFixed(2));
  const rows = facts.per_parameter.map((row) => [
    row.category,
    size(row.bytes),
    figure(row.per_parameter),
    figure(row.at_peak),
    figure(row.at_rest),
    row.textbook,
  ]);
  const heads = ["category", "most", "per parameter", "at the peak", "at rest", "textbook"];
  return table(`Bytes per parameter, of ${countText(facts.parameters)}`, heads, rows);
}

/** The list of changes: the same as in the terminal, and in its words. */
export function changes(
  facts: Facts,
  show: (finding: Finding, number: number) => void,
): HTMLElement {
  const found = facts.findings ?? [];
  const rows = facts.advice ?? [];
  const parts: (HTMLElement | null)[] = [h("h2", {}, "What to change")];
  parts.push(...(facts.notes ?? []).map((note) => h("p", { class: "note" }, prose(note))));
  for (const head of new Set(rows.map((row) => row.head))) {
    const own = rows.filter((row) => row.head === head).map((row) => change(row, found, show));
    parts.push(h("h3", {}, head), h("ul", { class: "changes" }, ...own));
  }
  if (facts.together) parts.push(h("p", { class: "together" }, facts.together));
  if (rows.length === 0) {
    parts.push(h("p", {}, "No change is known that lowers the peak by a hundredth."));
  }
  const said = new Set(rows.map((row) => row.finding));
  const others = found.map((row, i) =>
    said.has(i)
      ? null
      : h(
          "li",
          {},
          h("b", { title: exactText(row.bytes) }, `${row.kind}: `),
          prose(`${row.evidence}. ${sentence(row.change)} `),
          button(row, i, show),
        ),
  );
  if (others.some(Boolean)) {
    parts.push(h("h3", {}, "Found beside the peak"), h("ul", { class: "findings" }, ...others));
  }
  return h("div", {}, ...parts);
}

function change(
  row: Change,
  found: Finding[],
  show: (finding: Finding, number: number) => void,
): HTMLElement {
  const finding = row.finding === null ? null : found[row.finding];
  const title = row.saves === null ? null : exactText(row.saves);
  return h(
    "li",
    { class: "card", "data-bytes": row.saves, title },
    ...saidText(row.said),
    " ",
    finding && row.finding !== null ? button(finding, row.finding, show) : null,
    row.code ? h("pre", { tabindex: 0, role: "region", "aria-label": "Code" }, row.code) : null,
  );
}

/** What a change saves stands out. */
export function saidText(said: string): HTMLElement[] {
  const saves = /^saves [\d.]+ \w+/.exec(said)?.[0] ?? "";
  return [h("b", {}, saves), prose(said.slice(saves.length))];
}

function button(
  row: Finding,
  number: number,
  show: (finding: Finding, number: number) => void,
): HTMLElement | null {
  if (row.at === null && !row.line && !row.module) return null;
  const what = row.line ? "line" : "module";
  const text = row.at === null ? `show all bars of this ${what}` : "show its allocations";
  return h("button", { click: () => show(row, number) }, text);
}

/** What the bytes of a finding's allocations have to do with the finding's. */
export function provedText(finding: Finding, bytes: number): string {
  const { kind, turns } = finding;
  const own = sizeText(finding.bytes);
  if (turns === null) return `each larger than the last: ${kind} of ${own} a step`;
  const each = kind === "growth" ? Math.floor(bytes / turns) : bytes;
  if (each !== finding.bytes) return `at its own moment the finding's ${own}`;
  return turns === 1 ? `the finding's ${own}` : `${countText(turns)} times the finding's ${own}`;
}

/** A forecast that somebody asked for when the page was made. */
export function answer(text: string): HTMLElement {
  return h("pre", { class: "answer", tabindex: 0, role: "region", "aria-label": "Forecast" }, text);
}

/** The first change; without one, what to know or the first finding. */
export function firstAdvice(facts: Facts): { kind: string; text: string } | null {
  const [row] = facts.advice ?? [];
  if (row) return { kind: row.kind, text: row.said };
  const [note] = facts.notes ?? [];
  if (note) return { kind: "note", text: note };
  const [first] = facts.findings ?? [];
  return first ? { kind: first.kind, text: `${first.evidence}: ${first.change}.` } : null;
}

const sentence = (text: string) => (text ? `${text[0].toUpperCase()}${text.slice(1)}.` : "");

export function health(facts: Facts): HTMLElement | null {
  if (facts.health.length === 0) return null;
  const rows = facts.health.map((row) => [
    row.name,
    row.severity,
    countText(row.count),
    `${row.meaning}. ${row.advice}`,
  ]);
  return table(
    "What was lost or could not be seen",
    ["what", "severity", "count", "meaning"],
    rows,
  );
}

export function costs(facts: Facts): HTMLElement | null {
  if (facts.costs.length === 0) return null;
  const row = (cost: Cost) => [
    cost.name || "no module",
    timeText(cost.time_ns),
    shareText(cost.time_share, 1),
    timeText(cost.forward_ns),
    timeText(cost.backward_ns),
    cost.time_ratio === null ? "" : cost.time_ratio.toFixed(2),
    cost.expected_ratio === null ? "" : cost.expected_ratio.toFixed(2),
    cost.verdict,
  ];
  const heads = ["module", "time", "share", "forward", "backward", "ratio", "expected", "verdict"];
  return table("What modules cost", heads, facts.costs.map(row));
}

/** What somebody has to know before trusting a picture. */
export function isMostlyIdle({ idle_ns, begin_ns, end_ns }: Facts): boolean {
  return 2 * idle_ns > end_ns - begin_ns;
}

export function notes(facts: Facts): string[] {
  const found: string[] = [];
  if (isMostlyIdle(facts)) {
    const whole = timeText(facts.end_ns - facts.begin_ns);
    found.push(
      `Nothing was allocated or freed in ${timeText(facts.idle_ns)} of ${whole}, so the pictures ` +
        'go by events. "across: time" shows the clock.',
    );
  }
  if (facts.rest) {
    found.push(
      `${countText(facts.rest.count)} of ${countText(facts.allocations)} allocations cover least of the ` +
        "picture and are not drawn. They are in every sum; between the moments Python wrote down, " +
        "sums are those of the moment before. The peak and the end are exact.",
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
