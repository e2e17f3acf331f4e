import assert from "node:assert/strict";
import { test } from "node:test";
import { deflateSync } from "node:zlib";
import { asFloat64, asUint32, fromBase64, inflate } from "../src/decode";
import { codeParts, countText, signed, sizeText, ticks, timeText } from "../src/format";
import { escaped, expression } from "../src/search";
import { fromHash, History, type State, toHash } from "../src/state";

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
};

test("numbers that Python packed come back", async () => {
  const numbers = Uint32Array.from([0, 1, 256, 4294967295, 77]);
  const bytes = new Uint8Array(numbers.buffer);
  const planes = new Uint8Array(bytes.length);
  for (let i = 0; i < bytes.length; i++) planes[(i % 4) * 5 + Math.floor(i / 4)] = bytes[i];
  const text = deflateSync(planes).toString("base64");
  assert.deepEqual(asUint32(await inflate(fromBase64(text))), numbers);
  const sizes = Float64Array.from([0, 1, 2 ** 40 + 512, 2 ** 53 - 1, -1]);
  const eights = new Uint8Array(sizes.buffer).map(
    (_, i, all) => all[(i % 5) * 8 + Math.floor(i / 5)],
  );
  assert.deepEqual(asFloat64(eights), sizes);
  assert.deepEqual(asUint32(new Uint8Array(0)), new Uint32Array(0));
  assert.deepEqual(asFloat64(new Uint8Array(0)), new Float64Array(0));
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
  };
  assert.deepEqual(fromHash(`#${toHash(shown, usual)}`, usual), shown);
  assert.equal(toHash(usual, usual), "");
});

test("an address that makes no sense changes nothing", () => {
  const odd = "#tab=<img>&axis=9&from=a&to=&keys=,,evil&cursor=NaN&pinned=x&layout=constructor";
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
