// A tree as a picture: each row is divided among the children of the one above.

import { signed, sizeText } from "./format";
import { label, Pane } from "./pane";
import { type Node, nameless, searchOf } from "./tree";

const ROW = 24;
const MOST_ROWS = 7;
const COLORS = [
  "#4477aa",
  "#43803a",
  "#aa4499",
  "#876900",
  "#2b7f7f",
  "#b04d5f",
  "#77772a",
  "#882255",
];

interface Cell {
  path: Node[];
  node: Node;
  left: number;
  right: number;
  depth: number;
}

export class Icicle {
  readonly pane: Pane;
  private cells: Cell[] = [];
  private tree: Node | null = null;
  private compares = false;

  constructor(
    name: string,
    label: string,
    choose: (search: string) => void,
    tell: (text: string, event: MouseEvent | null) => void,
  ) {
    this.pane = new Pane(name, label, 0);
    const { canvas } = this.pane;
    canvas.addEventListener("click", (event) => {
      const cell = this.at(event);
      if (cell) choose(searchOf(cell.path));
    });
    canvas.addEventListener("mousemove", (event) => {
      const cell = this.at(event);
      tell(cell ? this.text(cell) : "", event);
    });
    canvas.addEventListener("mouseleave", () => tell("", null));
  }

  show(tree: Node, compares = false): void {
    this.tree = tree;
    this.compares = compares;
    this.pane.canvas.style.height = `${Math.min(depthOf(tree), MOST_ROWS) * ROW}px`;
    this.draw();
  }

  draw(): void {
    if (!this.tree) return;
    this.pane.measure();
    const context = this.pane.begin();
    this.cells = [];
    this.divide(this.tree, [], 0, this.pane.width, 0);
    for (const cell of this.cells) this.drawCell(context, cell);
  }

  private weight(node: Node): number {
    if (!this.compares) return Math.max(node.bytes, 0);
    if (node.children.length === 0) return Math.abs(node.bytes);
    return node.children.reduce((total, child) => total + this.weight(child), 0);
  }

  private divide(node: Node, path: Node[], left: number, right: number, depth: number): void {
    if (depth >= MOST_ROWS) return;
    const whole = node.children.reduce((total, child) => total + this.weight(child), 0);
    if (whole <= 0) return;
    // What is not listed has its share, too: the rest of the row stays empty.
    const scale = (right - left) / Math.max(whole, this.compares ? 0 : node.bytes);
    let at = left;
    node.children.forEach((child) => {
      const width = this.weight(child) * scale;
      const own = [...path, child];
      if (width >= 0.7) {
        this.cells.push({ path: own, node: child, left: at, right: at + width, depth });
        this.divide(child, own, at, at + width, depth + 1);
      }
      at += width;
    });
  }

  private drawCell(context: CanvasRenderingContext2D, cell: Cell): void {
    const { left, right, depth, node } = cell;
    context.fillStyle = this.compares
      ? node.bytes > 0
        ? "#b0413e"
        : "#2f6fa5"
      : COLORS[hash(cell.path[0].name) % COLORS.length];
    context.fillRect(left, depth * ROW, Math.max(right - left - 1, 0.5), ROW - 1);
    // Inner rows are darker, so that white words on them can be read.
    context.fillStyle = `rgb(0 0 0 / ${Math.min(0.12 * depth, 0.5)})`;
    context.fillRect(left, depth * ROW, Math.max(right - left - 1, 0.5), ROW - 1);
    context.fillStyle = "#fff";
    const amount = this.compares ? signed(node.bytes) : sizeText(node.bytes);
    const name = node.name || nameless(node.key);
    const text = `${name}  ${amount}`;
    const room = right - left - 8;
    const shown = context.measureText(text).width <= room ? text : name;
    label(context, shown, left + 4, depth * ROW + ROW / 2, room, true);
  }

  private at(event: MouseEvent): Cell | undefined {
    const box = this.pane.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const depth = Math.floor((event.clientY - box.top) / ROW);
    return this.cells.find((cell) => cell.depth === depth && cell.left <= x && x < cell.right);
  }

  private text({ path, node }: Cell): string {
    const names = path.map((each) => each.name || nameless(each.key)).join(" \u203a ");
    const change = `${sizeText(node.before)} before, ${signed(node.bytes)}`;
    return `${names}: ${this.compares ? change : sizeText(node.bytes)}`;
  }
}

const depthOf = (node: Node): number =>
  node.children.reduce((most, child) => Math.max(most, 1 + depthOf(child)), 0);

function hash(text: string): number {
  let found = 7;
  for (let i = 0; i < text.length; i++) found = (found * 31 + text.charCodeAt(i)) >>> 0;
  return found;
}
