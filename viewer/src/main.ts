// The same script is the page's and the worker's: what there is tells which of them it is.

import { App } from "./app";
import { type Channel, open, serve } from "./channel";
import { COLUMNS } from "./dataset";
import { fromBase64 } from "./decode";
import type { Document } from "./document";

function take(name: string): string {
  const element = document.getElementById(`data-${name}`);
  const text = element?.textContent ?? "";
  element?.remove();
  return text;
}

/** Hands over each column as soon as the browser has read it; the worker opens it meanwhile. */
async function columns(doc: Document, channel: Channel): Promise<void> {
  const left = new Set(doc.sets.flatMap((_, i) => COLUMNS.map((name) => `${i}-${name}`)));
  const look = (all: boolean) => {
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

async function start(root: HTMLElement, script: string): Promise<void> {
  const text = take("document");
  const opened = open(script);
  const doc: Document = JSON.parse(text);
  const channel = await opened;
  await columns(doc, channel);
  const places = await channel.ask("load", { text });
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
