// The same script is the page's and the worker's: what there is tells which of them it is.

import { App } from "./app";
import { open, serve } from "./channel";
import type { Document } from "./document";

const COLUMNS = ["kind", "address", "life", "clock", "begins", "row", "kinds", "sizes", "blocks"];

function take(name: string): string {
  const element = document.getElementById(`data-${name}`);
  const text = element?.textContent ?? "";
  element?.remove();
  return text;
}

async function start(root: HTMLElement, script: string): Promise<void> {
  const doc: Document = JSON.parse(take("document"));
  const { strings, categories, phases, texts, colors } = doc;
  const words = { strings, categories, phases, texts, colors };
  const sets = doc.sets.map((facts, i) => ({
    facts,
    columns: Object.fromEntries(COLUMNS.map((name) => [name, take(`${i}-${name}`)])),
  }));
  const channel = await open(script);
  const places = await channel.ask("load", { words, sets });
  const app = new App(doc, channel, places, root);
  await app.start();
  document.documentElement.dataset.ready = channel.where;
  performance.mark("interactive");
}

if (typeof document === "undefined") {
  serve(self as unknown as DedicatedWorkerGlobalScope);
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
