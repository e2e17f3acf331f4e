// Elements, made in one expression. Texts are always text: names in a trace may hold any markup.

import type { Document } from "./document";
import { codeParts } from "./format";

export type Child = Node | string | null | undefined | false;
type Handler = (event: never) => void;
export type Attributes = Record<string, string | number | boolean | null | undefined | Handler>;

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") {
      element.addEventListener(name, value as unknown as EventListener);
    } else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, String(value));
  }
  for (const child of children) if (child) element.append(child);
  return element;
}

export function fill(parent: Element, ...children: Child[]): void {
  parent.replaceChildren(...children.filter((child): child is Node | string => !!child));
}

/** A sentence whose `code` stands in code elements. */
export function prose(text: string): HTMLElement {
  const parts = codeParts(text).map(([part, isCode]) => (isCode ? h("code", {}, part) : part));
  return h("span", {}, ...parts);
}

/** Attributes of a word that says what it means, under the mouse and when it is touched. */
export function explained(doc: Document, word: string): Attributes {
  return { "data-meaning": doc.meanings[word] };
}

/** A word that says what it means. */
export function term(doc: Document, word: string, text = word): HTMLElement {
  if (!doc.meanings[word]) return h("span", {}, text);
  return h("button", { class: "term", ...explained(doc, word) }, text);
}

/** A list to choose from. */
export function choice(
  label: string,
  options: [value: string, text: string][],
  chosen: string,
  change: (value: string) => void,
): HTMLLabelElement {
  const select = h(
    "select",
    { change: () => change(select.value), name: label },
    ...options.map(([value, text]) => h("option", { value }, text)),
  );
  select.selectedIndex = Math.max(
    options.findIndex(([value]) => value === chosen),
    0,
  );
  return h("label", { class: "choice" }, `${label} `, select);
}

export function swatch(color: string): HTMLElement {
  const element = h("span", { class: "swatch", "aria-hidden": "true" });
  element.style.background = color;
  return element;
}

export function save(name: string, parts: BlobPart[], type: string): void {
  const address = URL.createObjectURL(new Blob(parts, { type }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
