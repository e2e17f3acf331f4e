"""Measures matrix products on this device: published rates, rates here, and the gain of padding.

    python benchmarks/gemm.py                     # everything, in some 7 minutes on an H200
    python benchmarks/gemm.py --parts peaks,gpt2  # only these anew; the file keeps the others
    python benchmarks/gemm.py --out DIR           # one JSON file; without a GPU a small version

The parts, in the order in which they run. The file is rewritten after each, so a time limit loses
only parts not yet measured. They are skipped, and the file says so.

* peaks: the fastest product of each dtype, after rests and sustained, several times each, beside
  `triton.testing.do_bench` on that shape and beside published maxima.
* gpt2: advice on GPT-2 124M, and the same training step with the advised size: the predicted and
  the measured gain. The padded model must have nothing left to gain.
* vocabulary: GPT-2's 50257 and larger sizes in a linear layer's three roles, eager and compiled.
* libraries: some of these, and square products, by cuBLAS and by cuBLASLt in the same rounds.
* alignment: n, k and m from 4088 to 4104; and each alignment from 1 to 128 elements.
* waves: n across full waves of tiles.
* peers: a plain event loop and do_bench beside ours, several times each.
* model: the time model's error on aligned products that it was not fitted to.

"claims" in the file has each published figure or promise, what was measured, and if it holds.
"measured" has the time and the machine of each part.
"""

import argparse
import dataclasses
import gc
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # from a checkout, wherever it is run

import models  # noqa: E402
import overhead  # noqa: E402

from benchmarks import kept, slug  # noqa: E402
from pytracer import errors  # noqa: E402
from pytracer.lab.gemm import advice, presets, shapes, sweep  # noqa: E402
from pytracer.lab.gemm.operands import as_asked, prepare  # noqa: E402
from pytracer.lab.gemm.shapes import LIBRARIES, ROLES, Gemm  # noqa: E402
from pytracer.lab.gemm.statistics import median, ratio  # noqa: E402
from pytracer.lab.gemm.sweep import Group, Knowledge  # noqa: E402
from pytracer.lab.gemm.timer import (  # noqa: E402
    EVEN,
    SUSTAINED,
    Comparison,
    Pace,
    Settings,
    Timer,
    Timing,
)

VOCABULARIES = (50257, 50258, 50260, 50264, 50272, 50304)
# mamf-finder's table for H100 and H200 SXM, mean of 100 iterations (stas00/ml-engineering).
PUBLISHED_TFLOPS = {"bf16": 794.5, "fp8": 1453.4}


class Bench:
    """A device, a timer, the results so far and the time left."""

    def __init__(self, out: Path, minutes: float) -> None:
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.timer = Timer(self.device, Settings(seconds=0.75 if self.cuda else 0.1))
        self.facts = self.timer.facts
        self.began = time.perf_counter()
        self.until = self.began + 60 * minutes
        self.target = out / f"gemm-{slug(self.facts.name) if self.cuda else 'cpu'}.json"
        self.part = ""  # the part that is being measured
        self.unnamed: list[tuple[dict[str, Any], Timing]] = []
        self.document: dict[str, Any] = {
            "machine": overhead.machine(),
            "device": self.facts.document(),
            "settings": vars(self.timer.settings),
            "parts": {},
            "measured": {},
            "skipped": {},
            "claims": [],
            "biases": [],
        }

    def keep(self, others: set[str]) -> None:
        """Takes over these parts of the file, if they were measured on such a device."""
        if not self.target.exists():
            return
        older = kept.read(self.target)
        if older["device"]["name"] != self.facts.name or "measured" not in older:
            return
        for what in ("parts", "measured", "skipped"):
            self.document[what] |= {p: one for p, one in older[what].items() if p in others}
        for what in ("claims", "biases"):
            self.document[what] += [one for one in older[what] if one["part"] in others]

    @property
    def left(self) -> float:
        return self.until - time.perf_counter()

    def measure(self, works: Any, *, null: bool = False, pace: Pace = EVEN) -> Comparison:
        found = self.timer(works, null=null, pace=pace)
        if found.bias is not None:
            first = found.timings[0]
            self.document["biases"].append({
                "part": self.part, "product": str(first.work), "beside": len(found.timings) - 1,
                "rounds": len(first.seconds), "stopped": found.stopped, **vars(found.bias),
            })  # fmt: skip
        return found

    def rows(self, done: list[tuple[Group, Comparison]]) -> list[dict[str, Any]]:
        """Measures the products. Their kernels get names at the end, after all timing."""
        known = Knowledge(self.facts, {}, {}, {})
        rows = []
        for group, comparison in done:
            for timing in comparison.timings:
                row = {"group": group.title, **sweep.explain(timing, known)}
                self.unnamed.append((row, timing))
                rows.append(row)
        return rows

    def name_kernels(self) -> None:
        """Names the kernels with a profiler, last: it may slow everything after it."""
        works = [timing.work for _, timing in self.unnamed if isinstance(timing.work, Gemm)]
        if self.left < 15:  # compiled products would be compiled again
            works = [work for work in works if not work.compiled]
        known = Knowledge(self.facts, sweep.learn_kernels(works, self.device), {}, {})
        for row, timing in self.unnamed:
            row.update(sweep.explain(timing, known))
        rows = list(rows_in(self.document["parts"]))
        older = Counter(row["dtype"] for row in rows if row["older_kernel"])
        self.part = ""
        if known.kernels:
            self.claim(
                f"products that run a kernel older than {self.facts.name}, of {len(rows)}",
                ", ".join(f"{count} in {dtype}" for dtype, count in older.items()) or "none",
                "reported",
                None,
            )

    def claim(self, text: str, value: Any, limit: str, holds: bool | None) -> None:
        if not self.cuda:
            holds = None  # the limits are for a GPU
        self.document["claims"].append(
            {"part": self.part, "claim": text, "measured": value, "limit": limit, "holds": holds}
        )
        word = {True: "holds", False: "DOES NOT HOLD", None: "-"}[holds]
        print(f"  {word}: {text}: {value} ({limit})", flush=True)

    def write(self) -> None:
        self.document["seconds"] = round(time.perf_counter() - self.began, 1)
        part = self.target.with_suffix(".part")
        kept.write(part, figures(self.document))
        part.replace(self.target)


# What tables and pictures show of a product, of its kernel and of its tiles.
_ROW = ("group", "m", "n", "k", "dtype", "role", "library", "tflops", "microseconds")
_ROW += ("alignment_bytes", "datasheet_share", "kernel", "older_kernel", "tiling")
_INSIDE = {"kernel": ("arch",), "tiling": ("tile_m", "tile_n", "waves")}
_PARTS = {  # of the parts that are not only rows
    "peaks": ("row", "tflops", "do_bench_tflops"),
    "peers": ("ours", "event loop", "do_bench"),
}


def figures(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures that tables and pictures are made from."""
    parts: dict[str, Any] = {}
    for name, part in document["parts"].items():
        if name in _PARTS:
            part = {title: kept.only(each, *_PARTS[name]) for title, each in part.items()}
        elif name == "gpt2":
            dimensions = kept.only(part["advice"]["dimensions"], "name", "advised")
            part = {"advice": {"dimensions": dimensions}, **kept.only(part, "step")}
        elif name == "model":
            part = kept.only(part, "constants", "median_error", "median_error_without_names")
        parts[name] = _without_samples(part)
    return document | {"parts": parts, "biases": kept.only(document["biases"], "part", "median")}


def _without_samples(found: Any) -> Any:
    if isinstance(found, list):
        return [_without_samples(each) for each in found]
    if not isinstance(found, dict):
        return found
    if "older_kernel" not in found:
        return {name: _without_samples(each) for name, each in found.items()}
    row = kept.only(found, *_ROW)
    inside = {
        name: kept.only(row[name], *names) for name, names in _INSIDE.items() if row.get(name)
    }
    return row | inside


def rows_in(found: Any) -> Iterator[dict[str, Any]]:
    """Returns every product of a document, wherever it is."""
    if isinstance(found, dict) and "older_kernel" in found:
        yield found
    elif isinstance(found, dict | list):
        for each in found.values() if isinstance(found, dict) else found:
            yield from rows_in(each)


# ---------------------------------------------------------------------------- parts


def peaks(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {}
    dtypes = ("bf16", "fp16", "tf32", "fp8", "fp32", "int8") if bench.cuda else ("fp32", "bf16")
    for dtype in dtypes:
        if dtype in sweep_dtypes(bench):
            found[dtype] = peak(bench, dtype)
    return found


def peak(bench: Bench, dtype: str) -> dict[str, Any]:
    """Measures the best rate of one dtype: three times after rests, and sustained; do_bench too."""
    rested = sweep.rested(bench.facts)
    first = sweep.find_peak(bench.facts, dtype, bench.measure)
    best = first.bursts.timings[0]
    bursts, sustained = [first.bursts], [first.sustained]
    theirs: dict[str, list[float]] = {"bursts": [], "sustained": []}
    for _ in range(2):
        bursts.append(bench.measure([best.work], null=True, pace=rested))
        theirs["bursts"] += [do_bench(bench, best.work, rested.rest) for _ in range(3 * bench.cuda)]
    for _ in range(2):  # in turns: the heat decides how much is sustained
        theirs["sustained"] += [do_bench(bench, best.work) for _ in range(2 * bench.cuda)]
        sustained.append(bench.measure([best.work], pace=SUSTAINED))
    rates = {
        "bursts": [one.timings[0].tflops for one in bursts],
        "sustained": [one.timings[0].tflops for one in sustained],
    }
    peers = {
        way: [best.work.flops / seconds / 1e12 for seconds in each] for way, each in theirs.items()
    }
    (row,) = bench.rows([(Group(f"{dtype} peak", (best.work,)), Comparison((best,)))])
    spread = (max(rates["bursts"]) - min(rates["bursts"])) / min(rates["bursts"])
    bench.claim(f"{dtype} peak, three times apart", f"{spread:.2%}", "within 2 %", spread <= 0.02)
    if bench.cuda:
        ours, peer = max(rates["bursts"]), max(peers["bursts"])
        bench.claim(
            f"{dtype} peak {ours:.0f} TFLOP/s beside do_bench's best {peer:.0f}",
            f"{ours / peer - 1:+.2%}",
            "within 3 %",
            abs(ours / peer - 1) <= 0.03,
        )
        # Two quantities: do_bench empties the cache before each call, ours idles between rounds.
        bench.claim(
            f"{dtype} sustained, in turns, TFLOP/s: ours, do_bench's",
            f"{statistics.median(rates['sustained']):.0f}, "
            f"{statistics.median(peers['sustained']):.0f}",
            "reported",
            None,
        )
    if dtype in PUBLISHED_TFLOPS and "H200" in bench.facts.name:
        reached = (max(rates["bursts"]), statistics.median(rates["sustained"]))
        shares = [rate / PUBLISHED_TFLOPS[dtype] for rate in reached]
        bench.claim(
            f"{dtype} over the published {PUBLISHED_TFLOPS[dtype]}, peak and sustained",
            ", ".join(f"{share:.3f}" for share in shares),
            "reported",
            None,
        )
    return {
        "row": row,
        "finalists": [[str(one.work), one.tflops] for one in first.bursts.timings],
        "tflops": rates,
        "do_bench_tflops": peers,
        "clocks": {
            "bursts": sweep.gauges_summary(bursts),
            "sustained": sweep.gauges_summary(sustained),
        },
    }


def sweep_dtypes(bench: Bench) -> tuple[str, ...]:
    from pytracer.lab.gemm import device

    return device.dtypes(bench.facts)


def vocabulary(bench: Bench) -> dict[str, Any]:
    rows, hidden = (8192, 768) if bench.cuda else (64, 48)
    sizes = VOCABULARIES if bench.cuda else (1001, 1008)
    done: list[tuple[Group, Comparison]] = []
    for compiled in (False, True) if bench.cuda else (False,):
        for role in ROLES:
            if bench.left < 60 and compiled:
                break
            works = tuple(
                dataclasses.replace(
                    shapes.linear(rows, size, hidden, "bf16")[role], compiled=compiled
                )
                for size in sizes
            )
            group = Group(f"{'compiled' if compiled else 'eager'} {role}", works)
            done.append((group, bench.measure(works, null=True)))
    gains = {
        group.title: {
            "from_first_to": [
                {"size": size, **vars(comparison.ratio(0, to=i))} for i, size in enumerate(sizes)
            ],
            "bias": vars(comparison.bias) if comparison.bias else None,
        }
        for group, comparison in done
    }
    for title, gain in gains.items():
        best = gain["from_first_to"][-1]
        bench.claim(
            f"{title}: {sizes[0]} takes so many times as long as {sizes[-1]}",
            f"{best['median']:.2f} ({best['low']:.2f} to {best['high']:.2f})",
            "reported",
            None,
        )
    return {"rows": bench.rows(done), "gains": gains}


def libraries(bench: Bench) -> dict[str, Any]:
    """Measures the products with either of CUDA's two libraries."""
    if not bench.cuda:
        return {"rows": [], "ratios": {}}
    products = {
        **{
            f"vocabulary {size}, {role}": gemm
            for size in (50257, 50264, 50304)
            for role, gemm in shapes.linear(8192, size, 768, "bf16").items()
        },
        **{f"square, {dtype}": Gemm(4096, 4096, 4096, dtype) for dtype in ("bf16", "fp16", "tf32")},
    }
    done = []
    for title, gemm in products.items():
        (group,) = sweep.through([Group(title, (gemm,))], LIBRARIES)
        done.append((group, bench.measure(group.works, null=True)))
    ratios = {group.title: vars(comparison.ratio(1)) for group, comparison in done}
    medians = [one["median"] for one in ratios.values()]
    bench.claim(
        f"cublaslt's time over cublas's, {len(medians)} products: least, median, most",
        f"{min(medians):.2f}, {statistics.median(medians):.2f}, {max(medians):.2f}",
        "reported",
        None,
    )
    return {"rows": bench.rows(done), "ratios": ratios}


def gpt2(bench: Bench) -> dict[str, Any]:
    batch, length = (16, 1024) if bench.cuda else (2, 32)
    if bench.cuda:
        config, name = models.GPT2, "gpt2"
        model = presets.described(name, "bf16", {"batch": batch, "seq": length})
    else:
        config = dataclasses.replace(models.TINY, vocabulary=1001)
        given = {"vocab": 1001, "hidden": 64, "layers": 2, "batch": batch, "seq": length}
        model = presets.described(None, "bf16", given)
    found = advice.advise(model, bench.measure)
    document: dict[str, Any] = {"advice": advice.document(found)}
    vocab = next(one for one in found.dimensions if one.name == "vocab")
    print(f"  {vocab.reason}", flush=True)
    clean_memory(bench)
    if vocab.advised is None:
        bench.claim("advice on GPT-2 names a padding", "none", "one", False)
        return document
    advised = vocab.advised
    bench.claim("advice on GPT-2 names a padding", advised.value, "one", True)
    padded_config = dataclasses.replace(config, vocabulary=advised.value)
    steps = {
        "as it is": training_step(config, batch, length, bench.device),
        "again": training_step(config, batch, length, bench.device),
        "padded": training_step(padded_config, batch, length, bench.device),
    }
    samples = step_samples(steps, bench, rounds=21)
    saved = median([a - b for a, b in zip(samples["as it is"], samples["padded"], strict=True)])
    bias = ratio(samples["again"], samples["as it is"])
    before = median(samples["as it is"])
    predicted, single = advised.gain, advised.spread
    document["step"] = {
        "seconds": samples,
        "before_ms": before.median * 1e3,
        "saved_ms": {key: value * 1e3 for key, value in vars(saved).items()},
        "predicted_ms": {key: value * 1e3 for key, value in vars(predicted).items()},
        "predicted_single_steps_ms": {key: value * 1e3 for key, value in vars(single).items()},
        "bias": vars(bias),
    }
    margin = advised.doubt + abs(bias.median - 1) * before.median
    low, high = min(single.low, predicted.low) - margin, max(single.high, predicted.high) + margin
    bench.claim(
        f"GPT-2's step with {advised.value}: saved {saved.median * 1e3:.2f} ms of "
        f"{before.median * 1e3:.1f}",
        f"{saved.median / before.median:.1%}",
        f"predicted {predicted.median * 1e3:.2f} ms, {low * 1e3:.2f} to {high * 1e3:.2f}",
        saved.high >= low and saved.low <= high,
    )
    steps.clear()
    clean_memory(bench)
    aligned = model.with_size("vocab", shapes.paddings(advised.value, 2)[-1])
    after = advice.advise(aligned, bench.measure)
    document["aligned"] = advice.document(after)
    left = [one.name for one in after.dimensions if one.advised is not None]
    bench.claim("an aligned GPT-2 has nothing to gain", left or "nothing", "nothing", not left)
    if bench.left < 150:
        bench.document["skipped"]["gpt2, tokens"] = "too little time was left"
        return document
    rows = presets.described(None, "bf16", {
        "vocab": 50304 if bench.cuda else 512, "hidden": 768 if bench.cuda else 64,
        "layers": 2, "batch": 3, "seq": 1023 if bench.cuda else 31,
    })  # fmt: skip
    tokens = advice.advise(rows, bench.measure)
    document["tokens"] = advice.document(tokens)
    for one in tokens.dimensions:
        bench.claim("3 x 1023 tokens of an aligned model", one.reason, "reported", None)
    return document


def training_step(
    config: models.Config, batch: int, length: int, device: torch.device
) -> Callable[[], None]:
    """Makes models.gpt2 with any vocabulary. The tokens are always from GPT-2's own."""
    torch.manual_seed(0)
    model = models.Transformer(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    own = 50257 if config.vocabulary > 50000 else 1001
    ids = torch.randint(own, (batch, length), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(ids, ids)
        loss.backward()
        optimizer.step()

    return step


def step_samples(
    steps: dict[str, Callable[[], None]], bench: Bench, rounds: int
) -> dict[str, list[float]]:
    """Times blocks of steps in turns, in an order drawn anew each round."""
    each = 3
    order, draw = list(steps), random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-2, rounds):  # two rounds warm up
        draw.shuffle(order)
        for name in order:
            seconds = timed(steps[name], each, bench)
            if number >= 0:
                samples[name].append(seconds)
    return samples


def timed(step: Callable[[], None], times: int, bench: Bench) -> float:
    if bench.cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        step()
    if bench.cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def clean_memory(bench: Bench) -> None:
    gc.collect()
    if bench.cuda:
        torch.cuda.empty_cache()


def model(bench: Bench) -> dict[str, Any]:
    calibration = list(sweep.run(sweep.calibration_groups(bench.facts, "bf16"), bench.measure))
    held_out = held_out_gemms(bench)
    groups = [Group("held out", tuple(held_out[i::3])) for i in range(3)]
    done = list(sweep.run(groups, bench.measure))
    works = [work for group, _ in [*calibration, *done] for work in group.works]
    kernels = sweep.learn_kernels(works, bench.device)
    training = [timing for _, comparison in calibration for timing in comparison.timings]
    fitted = sweep.calibrate(training, kernels, bench.facts)
    assert fitted is not None
    known = Knowledge(bench.facts, kernels, {}, {"bf16": fitted})
    unnamed = Knowledge(bench.facts, {}, {}, {"bf16": fitted})
    timings = [timing for _, comparison in done for timing in comparison.timings]
    rows = [sweep.explain(timing, known) for timing in timings]
    errors_ = sorted(abs(row["prediction_error"]) for row in rows)
    blind = sorted(abs(sweep.explain(one, unnamed)["prediction_error"]) for one in timings)
    middle = statistics.median(errors_)
    bench.claim(
        f"the time model on {len(rows)} products it was not fitted to: median error",
        f"{middle:.1%} (9 of 10 below {errors_[int(0.9 * len(errors_))]:.1%}; without kernel "
        f"names {statistics.median(blind):.1%})",
        "at most 10 %",
        middle <= 0.10,
    )
    return {
        "constants": vars(fitted),
        "calibration": [sweep.explain(timing, known) for timing in training],
        "held_out": rows,
        "median_error": middle,
        "median_error_without_names": statistics.median(blind),
    }


def held_out_gemms(bench: Bench) -> list[Gemm]:
    """Draws sizes with a fixed seed: multiples of 64 that are not in the calibration."""
    draw = random.Random(1)
    top = 128 if bench.cuda else 8
    used = {
        (work.m, work.n, work.k)
        for group in sweep.calibration_groups(bench.facts, "bf16")
        for work in group.works
    }
    found: list[Gemm] = []
    while len(found) < 24:
        m, n, k = (
            64 * round(2 ** draw.uniform(3 if bench.cuda else 0, top.bit_length() - 1))
            for _ in range(3)
        )
        if (m, n, k) not in used:
            found.append(Gemm(m, n, k, "bf16"))
    return found


def alignment(bench: Bench) -> dict[str, Any]:
    at = 4096 if bench.cuda else 256
    sizes = range(at - 8, at + 9) if bench.cuda else range(at - 2, at + 1)
    dtypes = ("bf16", "fp16", "tf32", "fp8", "fp32") if bench.cuda else ("fp32",)
    groups = []
    for dtype in dtypes:
        for dimension in ("n", "k", "m"):
            works = shapes.vary(Gemm(at, at, at, dtype), dimension, sizes)
            if len(works) > 1:
                groups.append(Group(f"{dtype} {dimension} {sizes[0]} to {sizes[-1]}", tuple(works)))
    around = Gemm(at, at, at)
    steps = [
        group
        for dtype in dtypes[:3]
        for group in sweep.alignment_groups(
            around, (dtype,), sweep.roles_of(dtype), ("n", "k", "m")
        )
    ]
    done = []
    for group in [*groups, *(steps if bench.cuda else steps[:1])]:
        if bench.left < 60:
            bench.document["skipped"]["alignment"] = f"stopped before {group.title}"
            break
        done.append((group, bench.measure(group.works, null=True)))
    guidance(bench, done)
    return {"rows": bench.rows(done)}


def guidance(bench: Bench, done: list[tuple[Group, Comparison]]) -> None:
    """Measures NVIDIA's guidance, step by step: multiples of 8 for fp16, on A100 better of 64."""
    for group, comparison in done:
        if not group.title.startswith(("fp16 forward", "bf16 forward")):
            continue
        dimension = group.title.split()[-1]
        rates = {
            getattr(timing.work, dimension) & -getattr(timing.work, dimension): timing.tflops
            for timing in comparison.timings
        }
        whole = rates.get(max(rates), 0.0)
        text = ", ".join(f"{step}: {rate / whole:.2f}" for step, rate in sorted(rates.items()))
        bench.claim(
            f"{group.title} as a multiple of 1, 2, 4 ... elements: share of the best aligned",
            text,
            "published: 8 is enough before A100, 64 on A100",
            None,
        )


def waves(bench: Bench) -> dict[str, Any]:
    m = 4096 if bench.cuda else 256
    groups = sweep.wave_groups(Gemm(m, m, m), ("bf16",), ("forward",), bench.facts.multiprocessors)
    done = list(sweep.run(groups, bench.measure))
    rows = bench.rows(done)
    text = ", ".join(f"{row['n']}: {row['tflops']:.3g}" for row in rows)
    bench.claim("TFLOP/s where waves of 128x256 tiles fill and begin", text, "reported", None)
    return {"rows": rows}


def peers(bench: Bench) -> dict[str, Any]:
    sizes = ((512, 512, 512), (4096, 4096, 4096), (8192, 50304, 768))
    found = {}
    for m, n, k in sizes if bench.cuda else ((128, 128, 128),):
        gemm = Gemm(m, n, k)
        methods: dict[str, list[float]] = {"ours": [], "event loop": [], "do_bench": []}
        for _ in range(5):
            methods["ours"].append(bench.measure([gemm]).timings[0].time.median)
            if bench.cuda:
                methods["event loop"].append(event_loop(bench, gemm))
                methods["do_bench"].append(do_bench(bench, gemm))
        found[str(gemm)] = {
            name: {
                "microseconds": [value * 1e6 for value in values],
                "median_microseconds": statistics.median(values) * 1e6,
                "spread": (max(values) - min(values)) / statistics.median(values),
            }
            for name, values in methods.items()
            if values
        }
        text = "; ".join(
            f"{name} {one['median_microseconds']:.2f} us, spread {one['spread']:.2%}"
            for name, one in found[str(gemm)].items()
        )
        bench.claim(f"{gemm}, five times each", text, "reported", None)
    return found


def event_loop(bench: Bench, gemm: Gemm, times: int = 100) -> float:
    """Times as most scripts do: warm up, then many calls on one set of operands, and two events."""
    call = prepare(gemm, bench.device, 1).calls[0]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with as_asked(gemm):
        for _ in range(10):
            call()
        begin.record()
        for _ in range(times):
            call()
        end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / times / 1e3


def do_bench(bench: Bench, gemm: Any, rest: float = 0.0) -> float:
    """Times with Triton's do_bench: with its defaults, or after a rest and for a moment only."""
    from triton.testing import do_bench as run

    call = prepare(gemm, bench.device, 1).calls[0]
    torch.cuda.synchronize()
    time.sleep(rest)
    moment = {"warmup": 1, "rep": 20} if rest else {}
    with as_asked(gemm):
        return float(run(call, return_mode="median", **moment)) / 1e3


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "peaks": peaks,
    "gpt2": gpt2,
    "vocabulary": vocabulary,
    "libraries": libraries,
    "alignment": alignment,
    "waves": waves,
    "peers": peers,
    "model": model,  # last, because it uses a profiler to see kernels
}
# About the seconds of each part on an H200. A part does not begin with less time left.
LEAST_SECONDS = {"peaks": 60.0, "vocabulary": 40.0, "gpt2": 40.0, "alignment": 20.0}


def chosen(names: str) -> Iterator[tuple[str, Callable[[Bench], dict[str, Any]]]]:
    for name, part in PARTS.items():
        if not names or name in names.split(","):
            yield name, part


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--parts", default="", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together")
    arguments = parser.parse_args()
    unknown = set(arguments.parts.split(",")) - set(PARTS) - {""}
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    warnings.filterwarnings("ignore", category=FutureWarning)
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.out, arguments.minutes)
    bench.keep(set(PARTS) - {name for name, _ in chosen(arguments.parts)})
    status = 0
    for name, part in chosen(arguments.parts):
        if bench.left < LEAST_SECONDS.get(name, 10.0):
            bench.document["skipped"][name] = "the time was up"
            continue
        print(f"{name} ({bench.left:.0f} s left)", flush=True)
        bench.part = name
        bench.document["measured"][name] = overhead.machine()
        try:
            bench.document["parts"][name] = part(bench)
        except (errors.PytracerError, RuntimeError, ImportError) as error:
            print(f"  {name} failed: {error}", flush=True)
            bench.document["skipped"][name] = f"failed: {error}"
            status = 1
        clean_memory(bench)
        bench.write()
    bench.name_kernels()
    bench.part = ""
    if biases := bench.document["biases"]:
        off = sorted(abs(one["median"] - 1) for one in biases)
        bench.claim(
            f"the same product twice, {len(off)} times: median and largest difference",
            f"{off[len(off) // 2]:.3%}, {off[-1]:.3%}",
            "at most 0.5 %",
            off[-1] <= 0.005,
        )
    bench.write()
    print(f"written: {bench.target}")
    return status


if __name__ == "__main__":
    sys.exit(main())
