// The same tree as a table, for eyes, keyboards and screen readers.

import { fill, h } from "./dom";
import { countText, exactText, shareText, signed, sizeText } from "./format";
import { type Node, nameless } from "./tree";

export type Sort = "bytes" | "count" | "name";

const MOST = 60; // rows of a level before somebody asks for more

export interface Options {
  caption: string;
  whole: number; // what shares are of
  unit: (amount: number) => string;
  compares: boolean;
  choose: (path: Node[]) => void;
  sort: Sort;
  open: string; // rows that are open, as `changed` has written them
  changed: (sort: Sort, open: string) => void;
}

const WITHIN = "\u001f"; // between the names of a row's path
const BETWEEN = "\u001e"; // between rows

const keyOf = (path: Node[]) => path.map((node) => node.name).join(WITHIN);

const WORTH_OPENING = 0.2; // of the whole

/** The rows of the model that hold much are open, until somebody opens or closes one. */
function usuallyOpen(tree: Node): string[] {
  const found: string[] = [];
  const look = (node: Node, path: Node[]) => {
    for (const child of node.children) {
      const inner = child.children.filter((each) => each.key === "module");
      const hasParts = inner.some((each) => !/^\[?\d+\]?$/.test(each.name));
      if (
        child.key !== "module" ||
        !hasParts ||
        Math.abs(child.bytes) < WORTH_OPENING * Math.abs(tree.bytes)
      )
        continue;
      found.push(keyOf([...path, child]));
      look(child, [...path, child]);
    }
  };
  look(tree, []);
  return found;
}

export class TreeTable {
  readonly element = h("div", { class: "scroll", tabindex: 0, role: "region" });
  private open = new Set<string>();
  private readonly whole = new Set<string>();
  private sort: Sort = "bytes";
  private tree: Node | null = null;
  private options: Options | null = null;

  show(tree: Node, options: Options): void {
    this.tree = tree;
    this.options = options;
    this.sort = options.sort;
    this.open = new Set(options.open ? options.open.split(BETWEEN) : usuallyOpen(tree));
    this.draw();
  }

  private draw(): void {
    const { tree, options } = this;
    if (!tree || !options) return;
    const body = h("tbody");
    this.rows(body, tree, [], options);
    this.element.setAttribute("aria-label", options.caption);
    fill(
      this.element,
      h(
        "table",
        { class: "tree" },
        h("caption", {}, options.caption),
        h("thead", {}, this.heads(options)),
        body,
        h("tfoot", {}, this.row("all", tree, [], options, null)),
      ),
    );
  }

  private heads(options: Options): HTMLElement {
    const head = (text: string, sort: Sort | null) => {
      const sorted = sort === this.sort ? (sort === "name" ? "ascending" : "descending") : null;
      const inside = sort ? h("button", { click: () => this.by(sort) }, text) : text;
      return h("th", { scope: "col", "aria-sort": sorted }, inside);
    };
    const changed = options.compares
      ? [head("before", null), head("after", null), head("change", "bytes")]
      : [head("bytes", "bytes"), head("share", null)];
    return h(
      "tr",
      {},
      head("who", "name"),
      ...changed,
      head(options.compares ? "allocations \u00b1" : "allocations", "count"),
    );
  }

  private by(sort: Sort): void {
    this.sort = sort;
    this.draw();
    this.tell();
  }

  private tell(): void {
    // Without a word of open rows the usual ones are open, so that none has a sign of its own.
    this.options?.changed(this.sort, [...this.open].join(BETWEEN) || BETWEEN);
  }

  private rows(body: HTMLElement, node: Node, path: Node[], options: Options): void {
    const key = keyOf(path);
    const children = [...node.children].sort((a, b) => this.order(a, b));
    const shown = this.whole.has(key) ? children : children.slice(0, MOST);
    for (const child of shown) {
      const own = [...path, child];
      const ownKey = keyOf(own);
      const isOpen = this.open.has(ownKey);
      const toggle = () => {
        if (isOpen) this.open.delete(ownKey);
        else this.open.add(ownKey);
        this.draw();
        this.focus(ownKey);
        this.tell();
      };
      body.append(this.row(child.name || nameless(child.key), child, own, options, toggle));
      if (isOpen) this.rows(body, child, own, options);
    }
    this.more(body, node, path, children.slice(shown.length), key);
    this.same(body, node, path);
  }

  private more(body: HTMLElement, node: Node, path: Node[], left: Node[], key: string): void {
    if (left.length === 0 && node.others === 0) return;
    const ask = () => {
      this.whole.add(key);
      this.draw();
    };
    const listed = node.children.reduce((total, child) => total + child.bytes, 0);
    const others = `${countText(node.others)} more, ${sizeText(node.bytes - listed)}, are in the sums`;
    const cell = h("td", { colspan: 6 });
    cell.style.paddingLeft = `${path.length + 1.6}em`;
    if (left.length)
      cell.append(h("button", { click: ask }, `show ${countText(left.length)} more`));
    else cell.append(others);
    body.append(h("tr", {}, cell));
  }

  private same(body: HTMLElement, node: Node, path: Node[]): void {
    if (node.same === 0) return;
    const [rows, are] = node.same === 1 ? ["row", "is"] : ["rows", "are"];
    const text = `${countText(node.same)} ${rows} did not change and ${are} left out`;
    const cell = h("td", { colspan: 6, class: "words" }, text);
    cell.style.paddingLeft = `${path.length + 1.6}em`;
    body.append(h("tr", {}, cell));
  }

  private row(
    name: string,
    node: Node,
    path: Node[],
    options: Options,
    toggle: (() => void) | null,
  ): HTMLElement {
    const key = keyOf(path);
    const isOpen = this.open.has(key);
    const mark = node.children.length > 0 && toggle;
    const opener = mark
      ? h(
          "button",
          { class: "open", "aria-expanded": String(isOpen), "data-key": key, click: toggle },
          isOpen ? "\u25be" : "\u25b8",
          h("span", { class: "hidden" }, ` ${name}`),
        )
      : h("span", { class: "open" });
    const chosen = toggle
      ? h("button", { class: "name", click: () => options.choose(path) }, name)
      : name;
    const head = h("th", { scope: "row" }, h("span", { class: "path" }, opener, chosen));
    head.style.paddingLeft = `${Math.max(path.length - 1, 0) * 1.2}em`;
    return h("tr", { "data-bytes": node.bytes }, head, ...this.numbers(node, options));
  }

  private numbers(node: Node, options: Options): HTMLElement[] {
    const cell = (amount: number, text: string) => h("td", { title: exactText(amount) }, text);
    const count = h("td", {}, countText(node.count));
    if (options.compares) {
      const after = node.before + node.bytes;
      const change = cell(node.bytes, signed(node.bytes));
      if (node.bytes !== 0) change.className = node.bytes > 0 ? "more" : "less";
      return [
        cell(node.before, sizeText(node.before)),
        cell(after, sizeText(after)),
        change,
        count,
      ];
    }
    const share = h("td", { class: "share" }, shareText(node.bytes, options.whole));
    const part = options.whole ? Math.max(0, Math.min(1, node.bytes / options.whole)) : 0;
    share.style.setProperty("--part", `${100 * part}%`);
    return [cell(node.bytes, options.unit(node.bytes)), share, count];
  }

  private order(a: Node, b: Node): number {
    if (this.sort === "name") return a.name.localeCompare(b.name);
    if (this.sort === "count") return Math.abs(b.count) - Math.abs(a.count);
    return Math.abs(b.bytes) - Math.abs(a.bytes);
  }

  private focus(key: string): void {
    for (const button of this.element.querySelectorAll<HTMLElement>("button.open")) {
      if (button.dataset.key === key) button.focus();
    }
  }
}
