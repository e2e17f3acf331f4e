import assert from "node:assert/strict";
import { test } from "node:test";
import { deflateSync } from "node:zlib";
import { asNumbers, asUint32, fromBase64, inflate, unfolded } from "../src/decode";
import { alike, hierarchy } from "../src/folded";
import {
  codeParts,
  countText,
  signed,
  sizeText,
  ticks,
  tickText,
  timesText,
  timeText,
} from "../src/format";
import { escaped, wanted, wordsOf } from "../src/search";
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
  keys: ["model", "op", "line"],
  hidden: [],
  search: "",
  pinned: null,
  tab: "timeline",
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
    tab: "map",
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

const TEXTS = ["category", "module", "op", "line", "phase", "shape", "freed_op"];
const finds = (word: string, text: string) => wanted(word, TEXTS)?.test(text);

test("a word of a search is found whole, in paths as whole parts", () => {
  const rows: [word: string, text: string, is: boolean][] = [
    ["op:mm", "aten::mm", true],
    ["op:mm", "aten::addmm", false],
    ["op:mm", "aten::_log_softmax", false],
    ["op:*softmax*", "aten::_log_softmax", true],
    ["module:h.0", "transformer.h.0", true],
    ["module:h.0", "transformer.h.0.mlp.up", true],
    ["module:h.0", "transformer.h.01", false],
    ["module:h.0", "depth.0", false],
    ["line:train", "src/train.py:12", true],
    ["line:train.py:1", "src/train.py:12", false],
    ["op=aten::mm", "aten::mm", true],
    ["op=aten::mm", "aten::mm_", false],
    ["module=h.*.mlp", "h.11.mlp", true],
    ["module=h.*.mlp", "h.11.mlp.up", false],
    ["module=h.*.mlp.**", "h.11.mlp.up", true],
    ["module=h.{1,3}.**", "h.3", true],
    ["module=h.{1,3}.**", "h.2.mlp", false],
    ['shape="[4, 8]"', "[4, 8]", true],
    ["^op:aten::a", "aten::add", true],
    ["^op:aten::a", "_aten::add", false],
    ["mm$", "aten::addmm", true],
    ["op:a[", "x a[ y", true],
  ];
  for (const [word, text, is] of rows) assert.equal(finds(word, text), is, `${word} in ${text}`);
});

test("a word looks only at the texts it names, and freed_op is not op", () => {
  assert.deepEqual(wanted("op:mm", TEXTS)?.keys, ["op"]);
  assert.deepEqual(wanted("freed_op:mm", TEXTS)?.keys, ["freed_op"]);
  assert.ok(!wanted("mm", TEXTS)?.keys.includes("freed_op"));
  assert.equal(wanted("op:", TEXTS), null);
  assert.deepEqual(wordsOf('op:mm shape="[4, 8]"  h.0'), ["op:mm", 'shape="[4, 8]"', "h.0"]);
});

test("a search for what is no expression is for the text itself", () => {
  assert.equal(finds("^a[", "a[y"), false);
  assert.equal(finds("a[$", "x a[$ y"), true);
  assert.equal(finds("a[", "x a[y"), true);
  assert.ok(new RegExp(escaped("f(x) [0]")).test("f(x) [0]"));
});

test("ticks that are a step apart have texts that differ", () => {
  const texts = [1.931e9, 1.932e9, 1.933e9].map((at) => tickText(at, 1e6));
  assert.deepEqual(texts, ["1.931 s", "1.932 s", "1.933 s"]);
  assert.equal(tickText(2e9, 1e9), "2.00 s");
});

const namesOf = (paths: string[], path: string) => hierarchy(paths)(path).map((row) => row.name);

test("layers that are alike are one row of the model, and its search finds exactly them", () => {
  const layers = [0, 1, 2].flatMap((i) => [`net.h.${i}.attn.q`, `net.h.${i}.mlp`, `net.h.${i}`]);
  const paths = ["net.head", ...layers];
  assert.deepEqual(namesOf(paths, "net.h.1.mlp"), ["net", "h.0-2", "mlp"]);
  assert.deepEqual(namesOf(paths, "net.h.1.attn.q"), ["net", "h.0-2", "attn.q"]);
  assert.deepEqual(namesOf(paths, "net.h.1"), ["net", "h.0-2", "itself"]);
  for (const path of paths) {
    for (const { word } of hierarchy(paths)(path)) assert.ok(finds(word, path), `${word} ${path}`);
  }
  const rows = hierarchy(paths)("net.h.0.mlp");
  assert.equal(rows[1].word, "module=net.h.*.**");
  const few = ["seq.0", "seq.2"];
  assert.deepEqual(namesOf(few, "seq.2"), ["seq", "2"]);
  const many = [0, 1, 2, 3, 5, 6].map((i) => `[${i}]`);
  assert.deepEqual(namesOf(many, "[5]"), ["[0 ... 6]", "[5]"]);
});

test("layers that differ only in their numbers have one name", () => {
  const name = (paths: string[]) => paths.map((path) => alike(paths)(path).name);
  assert.deepEqual(name(["h.0.mlp", "h.1.mlp", "head"]), ["h.*.mlp", "h.*.mlp", "head"]);
  assert.deepEqual(name(["[0]", "[2]"]), ["[0]", "[2]"]);
  const many = Array.from({ length: 9 }, (_, i) => `[${i}]`);
  assert.deepEqual(new Set(name(many)), new Set(["[0-8]"]));
  assert.equal(alike(many)("[3]").word, "module=[*]");
  assert.equal(alike(["0.1"])("0.1").name, "all layers");
  assert.equal(alike(["h.0.mlp"])("h.0.mlp").word, "module=h.*.mlp");
});
