// What is larger or smaller at one moment than at another, of any trace of the page.

import * as actions from "../actions";
import type { App } from "../app";
import { changeText, sideOf, sideText } from "../comparison";
import { choice, fill, h, swatch } from "../dom";
import type { Side } from "../engine";
import { countText, exactText, signed, sizeText } from "../format";
import { Icicle } from "../icicle";
import { searchOf } from "../tree";
import { TreeTable } from "../treetable";
import { largest } from "./largest";
import { groupChoices, rowsOf } from "./who";

const MOST_STEPS = 200; // of a trace, to choose from
const OF_JOBS = ["category", "model", "op"]; // first what it is: ranks share their buckets

export class CompareView {
  private readonly table = new TreeTable();
  private readonly icicle: Icicle;

  constructor(private readonly app: App) {
    const tell = (text: string, event: MouseEvent | null) => app.frame.showTip(text, event);
    const choose = (search: string) => actions.searchFor(app, search);
    this.icicle = new Icicle("icicle", "What changed, as a picture", choose, tell);
  }

  async show(asked: number): Promise<void> {
    const { app } = this;
    const sides = await this.sides();
    const usual = this.usual(sides);
    const before = sideOf(app.state.before, app.doc) ?? usual[0];
    const after = sideOf(app.state.after, app.doc) ?? usual[1];
    const { keys } = this;
    const compared = await app.channel.ask("compare", { keys, before, after });
    const [old, now] = await Promise.all([before, after].map((side) => this.levels(side)));
    const { tree } = compared;
    if (asked !== app.asked) return;
    const said = changeText(compared);
    fill(
      app.frame.panel,
      this.controls(sides, before, after),
      h("p", { class: "sentence", "data-bytes": tree.bytes, title: exactText(tree.bytes) }, said),
      this.categories(old, now),
      largest(app, "Largest changes", compared.largest, signed),
      this.icicle.pane.canvas,
      this.table.element,
    );
    this.icicle.show(tree, true);
    this.table.show(tree, {
      caption: "What changed",
      whole: 0,
      unit: sizeText,
      compares: true,
      choose: (path) => actions.searchFor(app, searchOf(path)),
      ...rowsOf(app),
    });
  }

  private get keys(): string[] {
    const { keys } = this.app.state;
    return this.app.doc.job && String(keys) === String(this.app.usual.keys) ? OF_JOBS : keys;
  }

  /** Bytes per category at a moment. */
  private async levels({ set, change }: Side): Promise<number[]> {
    const { axis } = this.app.state;
    return (await this.app.channel.ask("moment", { set, axis, change })).levels;
  }

  /** Which categories changed, the largest change first. */
  private categories(old: number[], now: number[]): HTMLElement {
    const { categories, colors } = this.app.doc;
    const changes = categories
      .map((name, i): [string, number] => [name, (now[i] ?? 0) - (old[i] ?? 0)])
      .filter(([, bytes]) => bytes !== 0)
      .sort(([, a], [, b]) => Math.abs(b) - Math.abs(a));
    const parts = changes.map(([name, bytes]) =>
      h("span", { title: exactText(bytes) }, swatch(colors[name]), `${name} `, amount(bytes)),
    );
    return h("div", { class: "chips changed" }, ...parts);
  }

  private controls(sides: [string, Side][], before: Side, after: Side): HTMLElement {
    const { app } = this;
    for (const side of [before, after]) {
      if (sides.some(([, each]) => sideText(each) === sideText(side))) continue;
      sides.push([`event ${countText(side.change)}`, side]);
    }
    const options = sides.map(([text, side]): [string, string] => [sideText(side), text]);
    const keys = this.keys.join(",");
    return h(
      "div",
      { class: "controls" },
      choice("before", options, sideText(before), (side) => app.change({ before: side })),
      choice("after", options, sideText(after), (side) => app.change({ after: side })),
      choice("group by", groupChoices(), keys, (k) => app.change({ keys: k.split(",") })),
    );
  }

  /** The moments that can be compared, of every trace of the page. */
  private async sides(): Promise<[string, Side][]> {
    const { doc, state } = this.app;
    const found: [string, Side][] = [];
    const known = new Set<string>();
    const add = (text: string, side: Side) => {
      if (!known.has(sideText(side))) found.push([text, side]);
      known.add(sideText(side));
    };
    for (const [set, facts] of doc.sets.entries()) {
      const name = doc.sets.length > 1 ? `${facts.name}, ${facts.device}: ` : "";
      const peak = facts.peak_change;
      for (const i of facts.steps.slice(0, MOST_STEPS).keys()) {
        const change = await actions.stepPeak(this.app, set, i);
        const highest = change === peak ? ", the highest" : "";
        add(`${name}peak of step ${facts.first_step + facts.steps[i].step}${highest}`, {
          set,
          change,
        });
      }
      add(`${name}peak`, { set, change: peak });
      add(`${name}end`, { set, change: facts.changes - 1 });
      add(`${name}begin`, { set, change: -1 });
      if (set === state.set) add(`${name}cursor`, { set, change: state.cursor });
    }
    return found;
  }

  private usual(sides: [string, Side][]): [Side, Side] {
    const { sets } = this.app.doc;
    const peak = (set: number) => ({ set, change: sets[set].peak_change });
    if (sets.length > 1) {
      const { device } = sets[0];
      const other = sets.findIndex((set, i) => i > 0 && set.device === device);
      // Of a job the worst rank comes first on the page, and a typical one after it.
      const sides: [Side, Side] = [peak(0), peak(Math.max(other, 1))];
      return this.app.doc.job ? [sides[1], sides[0]] : sides;
    }
    const steps = sides.filter(([text]) => text.includes("step"));
    if (steps.length > 1) return [steps[0][1], steps[steps.length - 1][1]];
    return [{ set: 0, change: -1 }, peak(0)];
  }
}

const amount = (bytes: number) => h("span", { class: "amount" }, signed(bytes));
