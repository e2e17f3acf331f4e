// Builds the viewer into pytracer/export/, where Python finds it; with --tests, the unit tests;
// with --to FOLDER, elsewhere.
import { readdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const elsewhere = process.argv.indexOf("--to");
const target = elsewhere > 0 ? process.argv[elsewhere + 1] : join(here, "..", "pytracer", "export");

if (process.argv.includes("--tests")) {
  const tests = readdirSync(join(here, "test")).filter((name) => name.endsWith(".test.ts"));
  await build({
    entryPoints: tests.map((name) => join(here, "test", name)),
    outdir: join(here, "build"),
    outExtension: { ".js": ".mjs" },
    bundle: true,
    platform: "node",
    format: "esm",
  });
} else {
  const common = { bundle: true, minify: true, legalComments: "none", charset: "ascii" };
  await build({
    ...common,
    entryPoints: [join(here, "src", "main.ts")],
    outfile: join(target, "report.js"),
    format: "iife",
    target: "es2022",
  });
  await build({
    ...common,
    entryPoints: [join(here, "src", "report.css")],
    outfile: join(target, "report.css"),
  });
}
