import assert from "node:assert/strict";
import { test } from "node:test";
import { Dataset, sum } from "../src/dataset";
import type { Facts } from "../src/document";
import { lanes } from "../src/lanes";
import {
  barAt,
  coarser,
  drawBars,
  drawFrom,
  drawNumbers,
  fitting,
  paintNumbers,
} from "../src/raster";
import { search } from "../src/search";
import { passes, Tree, totals } from "../src/tree";
import { columnsOf, random, type Spec, specs, words } from "./made";

const everything = () => true;

/** The result of work that could be interrupted. */
function whole<T>(work: Generator<undefined, T>): T {
  for (;;) {
    const { done, value } = work.next();
    if (done) return value;
  }
}

function alive(made: Spec[], change: number): Spec[] {
  return made.filter((one) => one.start <= change && one.end > change);
}

test("levels after every change are those of what is alive", () => {
  for (let seed = 1; seed < 30; seed++) {
    const { data, made } = random(seed);
    for (let change = -1; change < data.changes; change++) {
      const own = alive(made, change);
      const levels = data.levelsAt(change);
      words.categories.forEach((name, c) => {
        const expected = own.filter((one) => one.category === name);
        assert.equal(levels[c], sum(expected.map((one) => one.size)));
      });
      assert.equal(data.totalAt(change), sum(levels));
    }
  }
});

test("the peak of a stretch is the first of its highest moments", () => {
  for (let seed = 1; seed < 30; seed++) {
    const { data } = random(seed, 700);
    const cuts = [-1, 0, 5, 255, 256, 257, 511, 700, data.changes - 1].filter(
      (k) => k < data.changes,
    );
    for (const first of cuts) {
      for (const last of cuts.filter((k) => k >= first)) {
        let best = first;
        for (let k = first; k <= last; k++) if (data.totalAt(k) > data.totalAt(best)) best = k;
        assert.equal(data.peakIn(first, last), best);
      }
    }
  }
});

test("what overlaps a stretch is what a look at each allocation finds", () => {
  const { data, made } = random(3, 3000);
  for (const [first, last] of [
    [-1, -1],
    [0, 10],
    [2000, 2001],
    [100, 3000],
  ]) {
    const found: number[] = [];
    data.overlapping(first, last, (i) => found.push(i));
    const expected = made.flatMap((one, i) => (one.start <= last && one.end > first ? [i] : []));
    assert.deepEqual(found, expected);
  }
});

test("who holds what adds up to the level, along any keys", () => {
  const { data } = random(7, 400);
  for (const keys of [["module", "op"], ["category"], ["line", "op", "module"]]) {
    for (const at of [-1, 100, 399]) {
      const tree = new Tree(keys);
      tree.add(data, totals(data, { measure: "held", at, from: -1 }, everything));
      const root = tree.finished();
      assert.equal(root.bytes, data.totalAt(at));
      assert.equal(root.bytes, sum(root.children.map((child) => child.bytes)));
    }
  }
});

test("what grew is what was made less what was freed", () => {
  const { data } = random(11, 500);
  const range = { at: 420, from: 60 };
  const of = (measure: "grew" | "made" | "freed") =>
    sum(totals(data, { measure, ...range }, everything).bytes);
  assert.equal(of("grew"), data.totalAt(420) - data.totalAt(60));
  assert.equal(of("grew"), of("made") - of("freed"));
});

test("bytes times seconds are the area below the level", () => {
  const { data } = random(5, 120);
  const moment = { measure: "bytetime" as const, at: 100, from: 10 };
  let expected = 0;
  for (let k = 10; k < 100; k++) {
    expected += (data.totalAt(k) * (data.time[k + 1] - data.time[k])) / 1e9;
  }
  const found = sum(totals(data, moment, everything).bytes);
  assert.ok(Math.abs(found - expected) < 1e-9 * expected);
});

test("two moments compared differ by their levels", () => {
  const { data } = random(9, 300);
  const tree = new Tree(["module"]);
  tree.add(data, totals(data, { measure: "held", at: 20, from: -1 }, everything), -1);
  tree.add(data, totals(data, { measure: "held", at: 250, from: -1 }, everything), 1);
  const root = tree.finished();
  assert.equal(root.bytes, data.totalAt(250) - data.totalAt(20));
  assert.equal(root.before, data.totalAt(20));
});

test("of a comparison what did not change is counted, not listed", () => {
  const tree = new Tree(["module", "op"], true);
  for (const sign of [-1, 1]) {
    tree.addPath(["kept", "mm"], 100, 1, sign);
    tree.addPath(["moved", sign < 0 ? "mm" : "add"], 50, 1, sign);
  }
  tree.addPath(["made", "mm"], 8, 1, 1);
  const root = tree.finished();
  const names = root.children.map((child) => child.name);
  assert.deepEqual(names.sort(), ["made", "moved"]);
  assert.equal(root.same, 1);
  assert.equal(root.before, 150);
  assert.equal(root.bytes, 8);
});

test("a search finds what has every one of its words", () => {
  const { data, made } = random(2, 200);
  const found = search(data, "^module:m1$ ^op:op[02]");
  data.kind.forEach((kind, i) => {
    const expected = made[i].module === "m1" && /op[02]/.test(made[i].op);
    assert.equal(Boolean(found?.kinds[kind]), expected);
  });
  assert.equal(search(data, "  "), null);
  assert.equal(sum(search(data, "(((")?.kinds ?? []), 0);
  assert.deepEqual(search(data, "op:op1")?.matched, [
    { word: "op:op1", texts: ["op op1"], count: 1 },
  ]);
});

test("blocks that are alive together do not share a place in a lane", () => {
  const { data, made } = random(13, 300);
  const laid = lanes(data, "module");
  for (let change = 0; change < data.changes; change += 7) {
    const places = made
      .map((one, i) => ({ ...one, low: laid.bottoms[i] }))
      .filter((one) => one.start <= change && one.end > change)
      .sort((a, b) => a.low - b.low);
    places.slice(1).forEach((one, i) => {
      assert.ok(one.low >= places[i].low + places[i].size);
    });
  }
});

test("the bar under the mouse is the one whose pixels are there", () => {
  const { data, made } = random(17, 60);
  const window = { axis: "events" as const, from: -1, to: data.changes };
  const [width, height] = [600, 500];
  const high = data.highest * data.facts.address_unit;
  const colorOf = Uint32Array.from(data.size, (_, kind) => kind + 1);
  const bars = { bottoms: data.address, unit: 1, low: 0, high, colorOf, fadedOf: colorOf, edge: 0 };
  const picture = whole(drawBars(data, window, width, height, { ...bars, edge: 0xff }));
  made.forEach((one, i) => {
    const x = (Math.max(one.start, -1) + Math.min(one.end, data.changes)) / 2;
    const bytes = one.address + one.size / 2;
    const found = barAt(data, window, bars, x, bytes, 0, 0);
    assert.equal(found, i);
    const px = Math.floor(((x + 1) / (data.changes + 1)) * width);
    const py = Math.floor(height - (bytes / high) * height);
    assert.equal(picture.pixels[py * width + px], colorOf[data.kind[i]]);
  });
});

test("a moving picture has the bars that are drawn one by one", () => {
  const { data } = random(29, 4000);
  const [width, height] = [300, 200];
  const highest = data.highest * data.facts.address_unit;
  const colorOf = Uint32Array.from(data.size, (_, kind) => kind + 1);
  const shared = { bottoms: data.address, unit: 1, colorOf, fadedOf: colorOf, edge: 0 };
  const wide = whole(drawNumbers(data, 8192, height, { ...shared, low: 0, high: highest }));
  const numbers = coarser(wide, 512);
  assert.deepEqual(
    numbers.map((each) => each.width),
    [8192, 4096, 2048, 1024, 512],
  );
  for (const [from, to] of [
    [-1, 4000],
    [300, 1500],
    [2000, 2100],
  ]) {
    for (const axis of ["events", "time"] as const) {
      const scale = axis === "time" ? 1000 : 1;
      const window = { axis, from: from * scale, to: to * scale };
      const view = { ...shared, low: 0, high: highest };
      const each = whole(drawBars(data, window, width, height, view)).pixels;
      const level = whole(paintNumbers(fitting(numbers, data, window, width), data, view));
      const soon = drawFrom(level, data, window, width, height, highest, view).pixels;
      // A bar's border may be some pixels further to one side, and pixels have room for one bar.
      let same = 0;
      each.forEach((color, at) => {
        const around = [-3, -2, -1, 0, 1, 2, 3].map((by) => at + by);
        const there = around.map((place) => soon[place]);
        const is = color === 0 ? !soon[at] || around.some((a) => each[a]) : there.includes(color);
        if (is) same++;
      });
      assert.ok(same > 0.9 * each.length, `${axis} ${from} to ${to}: ${same} of ${each.length}`);
    }
  }
});

test("a finding's allocations are those that Python marked", () => {
  const { data, made } = random(31, 200);
  const moment = { measure: "held" as const, at: 199, from: -1 };
  const pass = passes(data, "finding 1", moment);
  made.forEach((one, i) => {
    assert.equal(pass(i), one.end >= data.changes);
    assert.equal(passes(data, "finding 0", moment)(i), false);
  });
  const kept = made.filter((one) => one.end >= data.changes);
  assert.equal(sum(totals(data, moment, pass).bytes), sum(kept.map((one) => one.size)));
});

test("only: what is alive at the peak, at the end, or kept", () => {
  const { data, made } = random(19, 200);
  const moment = { measure: "held" as const, at: 150, from: 30 };
  made.forEach((one, i) => {
    assert.equal(passes(data, "end", moment)(i), one.end >= data.changes);
    const kept = one.start > 30 && one.start <= 150 && one.end > 150;
    assert.equal(passes(data, "grew", moment)(i), kept);
  });
});

test("what is left out of the page is in the levels", () => {
  const made = specs(23, 100);
  const { columns, facts } = columnsOf(made);
  const rest = { count: 2, at: [0, 50], levels: { weights: [7, 11] } };
  const plain = new Dataset(facts as Facts, words, columns);
  const whole = new Dataset({ ...facts, rest } as Facts, words, columnsOf(made).columns);
  for (const [change, extra] of [
    [0, 7],
    [49, 7],
    [50, 11],
    [99, 11],
  ]) {
    assert.equal(whole.totalAt(change), plain.totalAt(change) + extra);
    assert.equal(sum(whole.levelsAt(change)), whole.totalAt(change));
  }
});
