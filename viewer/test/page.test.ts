import assert from "node:assert/strict";
import { test } from "node:test";
import { deflateSync } from "node:zlib";
import { asNumbers, asUint32, fromBase64, inflate, unfolded } from "../src/decode";
import { codeParts, countText, signed, sizeText, ticks, timesText, timeText } from "../src/format";
import { escaped, expression } from "../src/search";
import { fromHash, History, type State, toHash } from "../src/state";
import { planes } from "./made";

const usual: State = {
  set: 0,
  axis: "time",
  from: 0,
  to: 1000,
  low: 0,
  high: 0,
  cursor: 17,
  begin: null,
  layout: "address",
  color: "category",
  only: "all",
  measure: "held",
  keys: ["module", "op", "line"],
  hidden: [],
  search: "",
  pinned: null,
  tab: "who",
  before: "",
  after: "",
  sort: "bytes",
  open: "",
  theme: "system",
  room: "categories",
};

test("numbers that Python packed come back, of every width", async () => {
  for (const most of [0, 200, 60_000, 10_000_000, 4294967295]) {
    const numbers = [0, 1, Math.floor(most / 3), most, 0].map((number) => Math.min(number, most));
    const text = deflateSync(planes(numbers)).toString("base64");
    const bytes = await inflate(fromBase64(text));
    assert.deepEqual(asUint32(bytes, 5), Uint32Array.from(numbers));
    assert.deepEqual(asNumbers(bytes, 5), Float64Array.from(numbers));
  }
  const sizes = [0, 1, 2 ** 40 + 512, 2 ** 53 - 1];
  assert.deepEqual(asNumbers(planes(sizes), 4), Float64Array.from(sizes));
  assert.deepEqual(asUint32(new Uint8Array(0), 2), Uint32Array.from([0, 0]));
  assert.deepEqual([0, 1, 2, 3, 4].map(unfolded), [0, -1, 1, -2, 2]);
});

test("sizes and times are written as Python's table writes them", () => {
  const sizes: [number, string][] = [
    [0, "0 B"],
    [999, "999 B"],
    [1000, "0.98 KiB"],
    [3 << 20, "3.00 MiB"],
    [10 * 1024 ** 3, "10.0 GiB"],
    [-2048, "-2.00 KiB"],
    [999.6 * 1024, "0.98 MiB"],
  ];
  for (const [bytes, text] of sizes) assert.equal(sizeText(bytes), text);
  assert.equal(signed(2048), "+2.00 KiB");
  assert.equal(timeText(591_000_000), "591 ms");
  assert.equal(timeText(12), "12 ns");
  assert.equal(timesText([1_450_000_000, 26_000_000, 0]), "1.45 / 0.03 / 0.00 s");
  assert.equal(timesText([12_500, 300]), "12.5 / 0.30 us");
  assert.equal(countText(1234567), "1,234,567");
});

test("what stands in backticks is code", () => {
  assert.deepEqual(codeParts("put `a` into `b`"), [
    ["put ", false],
    ["a", true],
    [" into ", false],
    ["b", true],
    ["", false],
  ]);
  assert.deepEqual(codeParts("one ` alone"), [["one ` alone", false]]);
});

test("marks of an axis are round and inside", () => {
  assert.deepEqual(ticks(0, 1000, 4), [0, 500, 1000]);
  assert.deepEqual(ticks(5, 5, 4), []);
  assert.ok(ticks(0, 1, 4, true).every((at) => at >= 0 && at <= 1));
});

test("what is shown survives the address of the page", () => {
  const shown: State = {
    ...usual,
    from: 12.5,
    to: 99,
    cursor: 3,
    begin: 1,
    hidden: ["weights", "inputs"],
    search: "^module:h\\.0$ op:a&b=c#d",
    keys: ["op"],
    pinned: 5,
    tab: "bar",
    axis: "events",
    only: "finding 3",
    before: "0:-1",
    after: "1:77",
    sort: "name",
    open: "h.0\u001faten::mm\u001eh.1",
    theme: "dark",
    room: "device",
  };
  assert.deepEqual(fromHash(`#${toHash(shown, usual)}`, usual), shown);
  assert.equal(toHash(usual, usual), "");
});

test("an address that makes no sense changes nothing", () => {
  const odd =
    "#tab=<img>&axis=9&from=a&to=&keys=,,evil&cursor=NaN&pinned=x&layout=constructor&only=finding&before=x&sort=0&theme=9";
  assert.deepEqual(fromHash(odd, usual), usual);
  assert.deepEqual(fromHash("#from=9&to=1", usual), usual);
});

test("what is taken back is what was shown before", () => {
  const past = new History();
  past.keep(usual);
  past.keep({ ...usual, cursor: 18 });
  assert.equal(past.back()?.cursor, 18);
  assert.equal(past.back()?.cursor, 17);
  assert.equal(past.back(), undefined);
});

test("a search for what is no expression is for the text itself", () => {
  assert.ok(expression("a[").test("xa[y"));
  assert.ok(new RegExp(escaped("f(x) [0]")).test("f(x) [0]"));
});
