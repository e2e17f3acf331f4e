// What leaves the page: a link, a text, a picture, a table. Where a browser forbids to copy, it is saved.

import type { App } from "./app";
import { h, save } from "./dom";
import type { Who } from "./engine";
import { MODEL } from "./tree";

type Tell = (text: string) => void;

/** The address holds what is shown, but for the last tenth of a second. */
export async function copyLink(tell: Tell): Promise<void> {
  const { href } = window.location;
  const isFrame = href.startsWith("about:");
  if (isFrame) return tell("In a notebook there is no link: `t.report('run.html')` has one.");
  tell((await copied(href)) ? "The link is copied. It opens what you see now." : href);
}

export async function copyText(app: App, tell: Tell): Promise<void> {
  const text = pageText();
  if (await copied(text)) return tell("Copied as text.");
  save(`${app.facts.name}.txt`, [text], "text/plain");
  tell("This browser does not allow to copy, so the text is saved as a file.");
}

export function copyPicture(app: App, tell: Tell): void {
  const whole = picture();
  whole?.toBlob(async (blob) => {
    if (!blob) return;
    try {
      await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
      tell("The picture is copied.");
    } catch {
      save(`${app.facts.name}.png`, [blob], "image/png");
      tell("The picture is saved as a file.");
    }
  });
  if (!whole) tell("This view has no picture: choose Timeline, Address map, Modules or Lines.");
}

async function copied(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedAsSelected(text);
  }
}

/** As browsers do it where a page may not use the clipboard. */
function copiedAsSelected(text: string): boolean {
  const area = h("textarea", { class: "hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

/** With the breaks between lines that one sees, and without what is hidden. */
function asSeen(element: HTMLElement): string {
  // biome-ignore lint/performance/useDomNodeTextContent: the other has no breaks
  return element.innerText.replaceAll("\u00a0", " ");
}

/** What the page says first, and the tables of the view. */
function pageText(): string {
  const parts = [document.querySelector("h1")?.textContent ?? ""];
  for (const each of document.querySelectorAll<HTMLElement>("[data-text], .status, .panel table")) {
    if (each instanceof HTMLTableElement) parts.push(tableText(each));
    else if (asSeen(each)) parts.push(asSeen(each));
  }
  return `${parts.join("\n\n")}\n`;
}

/** Columns below each other. */
export function tableText(table: HTMLTableElement): string {
  const rows = [...table.rows].map((row) => {
    const indent = row.cells[0]?.style.paddingLeft ?? "";
    const before = " ".repeat(Math.round(2 * (Number.parseFloat(indent) || 0)));
    return [...row.cells].map((cell, i) => `${i ? "" : before}${asSeen(cell).trim()}`);
  });
  const widths: number[] = [];
  for (const row of rows) {
    row.forEach((text, i) => {
      widths[i] = Math.max(widths[i] ?? 0, text.length);
    });
  }
  const lines = rows.map((row) =>
    row.map((text, i) => (i ? text.padStart(widths[i]) : text.padEnd(widths[i]))).join("  "),
  );
  const caption = table.caption?.textContent;
  return [...(caption ? [caption] : []), ...lines.map((line) => line.trimEnd())].join("\n");
}

/** All pictures that are seen, below each other. */
function picture(): HTMLCanvasElement | null {
  const panes = [...document.querySelectorAll<HTMLCanvasElement>("canvas.pane")].filter(
    (canvas) => canvas.offsetHeight > 0,
  );
  if (panes.length === 0) return null;
  const whole = h("canvas", {
    width: Math.max(...panes.map((pane) => pane.width)),
    height: panes.reduce((total, pane) => total + pane.height, 0),
  });
  const context = whole.getContext("2d");
  if (!context) return null;
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, whole.width, whole.height);
  let top = 0;
  for (const pane of panes) {
    context.drawImage(pane, 0, top);
    top += pane.height;
  }
  return whole;
}

/** A row for each leaf of the tree; the model's rows are one column. */
export function saveTable(app: App, who: Who): void {
  const keys = app.keys.map((key) => (key === MODEL ? "module" : key));
  const lines = [[...keys, "bytes", "allocations"]];
  const walk = (node: Who["tree"], path: Who["tree"][]) => {
    if (node.children.length === 0) {
      const cells = keys.map((key) =>
        path.flatMap((each) => (each.key === key ? [each.name] : [])).join("."),
      );
      lines.push([...cells, String(node.bytes), String(node.count)]);
    }
    for (const child of node.children) walk(child, [...path, child]);
  };
  walk(who.tree, []);
  const quoted = (text: string) => `"${text.replaceAll('"', '""')}"`;
  const text = lines.map((cells) => cells.map(quoted).join(",")).join("\n");
  save(`${app.facts.name}.csv`, [`${text}\n`], "text/csv");
}
