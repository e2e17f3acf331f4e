"""Measures the report's page: its size, and how long a browser takes to show and move it.

    python benchmarks/report.py [--allocations 100000 1000000] [--write]

The trace is synthetic: training steps of a transformer with sizes, addresses and times as irregular
as an allocator's. Needs chromium and playwright. Targets, for a million allocations on 2 cores: a
page of 12 MB, first paint 0.3 s, interactive 1.5 s, a picture after panning or zooming within 50 ms
(95 of 100), and the block under the mouse within 16 ms. On a busy machine all of it takes longer;
`slowdown` is how much longer a loop took that only computes.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, not installed

from benchmarks.analysis import Step
from pytracer.analysis.facts import lifetimes, usage
from pytracer.export import report
from pytracer.recorded import Trace

RESULTS = Path(__file__).parent / "results"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
TARGETS = {"mb": 12.0, "first_paint_s": 0.3, "interactive_s": 1.5, "pan_zoom_p95_ms": 50.0}
TARGETS |= {"hover_p95_ms": 16.0}


def irregular(allocations: int) -> Trace:
    """Makes so many allocations, each with a size, an address and times of its own."""
    rng = np.random.default_rng(23)
    step = Step(layers=24)
    own = sum(1 for event in step.events if event[3] == 0)
    trace = step.trace(round(allocations / own * len(step.events)))
    found = lifetimes.lifetimes(trace)
    events, count = trace.events, len(found.start)
    made = np.flatnonzero(found.start >= 0)
    size = np.array(events.bytes)
    usual = (2 ** rng.uniform(9, 25, own)).astype(np.int64) // 512 * 512
    sizes = usual[np.arange(count) % own]
    odd = rng.random(count) < 0.2  # shapes that differ from step to step
    sizes[odd] = (2 ** rng.uniform(9, 22, int(odd.sum()))).astype(np.int64) // 4 * 4
    size[found.start[made]] = sizes[made]
    address = np.array(events.address)
    _place(address, found, sizes)
    gaps = rng.exponential(8_000, len(events.ticks)).astype(np.uint64) + np.uint64(100)
    scale = trace.events.ticks.astype(np.float64)
    ticks = (np.cumsum(gaps) * (scale[-1] / gaps.sum())).astype(np.uint64)
    whole = events._replace(bytes=size, address=address, ticks=np.maximum(ticks, events.ticks // 2))
    fresh = replace(trace, events=whole)
    vars(fresh).pop("_results", None)
    return fresh


def _place(address: Any, found: lifetimes.Lifetimes, sizes: Any) -> None:
    """Places blocks where the last block of their size was, and new ones on top."""
    start, end = found.start, found.completed
    order = [(int(p), 1, i) for i, p in enumerate(start) if p >= 0]
    order += [(int(p), 0, i) for i, p in enumerate(end) if p >= 0]
    order.sort()
    free: dict[int, list[int]] = {}
    places: dict[int, int] = {}
    top = 1 << 32
    for position, begins, i in order:
        room = -(-int(sizes[i]) // 512) * 512
        if not begins:
            address[position] = places[i]
            free.setdefault(room, []).append(places.pop(i))
            continue
        if same := free.get(room):
            places[i] = same.pop()
        else:
            places[i], top = top, top + room
        address[position] = places[i]


def slowdown() -> float:
    """Returns time by processor time of a loop, here and now: 1.0 on an idle machine."""
    wall, own = time.perf_counter(), time.process_time()
    while time.process_time() - own < 0.5:
        pass
    return round((time.perf_counter() - wall) / (time.process_time() - own), 2)


def measure(allocations: int, folder: Path) -> dict[str, Any]:
    """Measures one row of the result."""
    trace = irregular(allocations)
    page = folder / f"report-{allocations}.html"
    began = time.process_time()
    report.write([report.Named("run", trace)], page)
    wrote = time.process_time() - began
    before = slowdown()
    row: dict[str, Any] = {
        "allocations": len(lifetimes.lifetimes(trace).start),
        "mb": round(page.stat().st_size / 1e6, 2),
        "written_cpu_s": round(wrote, 2),
    }
    row |= _in_browser(page, usage.peak(trace).bytes)
    row["slowdown"] = round((before + slowdown()) / 2, 2)
    return row


def _in_browser(page: Path, peak: int) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        rounds = [_open(browser, page, peak) for _ in range(3)]
        tab = rounds[-1]["tab"]
        moved = _move(tab)
        tab.screenshot(path=page.with_suffix(".png"))
        browser.close()
    first = statistics.median(row["first"] for row in rounds)
    ready = statistics.median(row["ready"] for row in rounds)
    return {
        "first_paint_s": round(first / 1000, 3),
        "interactive_s": round(ready / 1000, 3),
        **moved,
    }


def _open(browser: Any, page: Path, peak: int) -> dict[str, Any]:
    tab = browser.new_page(viewport={"width": 1600, "height": 1000})
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(page.as_uri(), wait_until="commit")
    tab.wait_for_selector("html[data-ready]", state="attached", timeout=120_000)
    assert tab.locator(".status").get_attribute("data-bytes") == str(peak)
    assert all(url.startswith(("file:", "blob:")) for url in requests), requests
    first = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    ready = tab.evaluate("performance.getEntriesByName('interactive')[0].startTime")
    return {"tab": tab, "first": first, "ready": ready}


def _move(tab: Any) -> dict[str, Any]:
    """Pans, zooms and hovers, from the whole trace to a few events."""
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("f")
    tab.wait_for_timeout(1000)
    tab.evaluate("performance.clearMeasures()")
    for key in ("d", "a", *"wwdaswdawwwdadwwwwdadwwwwwwdad", "f", "w", "s"):
        tab.keyboard.press(key)
        tab.wait_for_timeout(120)
    draws = _durations(tab, "draw")
    tab.keyboard.press("f")
    tab.wait_for_timeout(500)
    tab.evaluate("performance.clearMeasures()")
    box = tab.locator("canvas.map").bounding_box()
    for i in range(60):
        tab.mouse.move(box["x"] + 90 + i * 11, box["y"] + 10 + (i * 37) % (box["height"] - 20))
        tab.wait_for_timeout(30)
    hovers = _durations(tab, "hover")
    return {
        "pan_zoom_p50_ms": round(statistics.median(draws), 1),
        "pan_zoom_p95_ms": round(float(np.percentile(draws, 95)), 1),
        "hover_p50_ms": round(statistics.median(hovers), 1),
        "hover_p95_ms": round(float(np.percentile(hovers, 95)), 1),
    }


def _durations(tab: Any, name: str) -> list[float]:
    found: list[float] = tab.evaluate(
        f"performance.getEntriesByName('{name}').map((entry) => entry.duration)"
    )
    return found


def main() -> int:
    """Measures the pages. Returns exit code 3 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--allocations", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for allocations in arguments.allocations:
            rows.append(measure(allocations, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    missed = [
        f"{row['allocations']:,} allocations: {name} is {row[name]}, the target is {target}"
        for row in rows
        for name, target in TARGETS.items()
        if row["allocations"] <= 1_100_000 and row[name] > target
    ]
    print("\n".join(missed) or "all targets are met")
    if arguments.write:
        document = {
            "taken": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "targets": TARGETS,
            "rows": rows,
        }
        (RESULTS / "report-cpu.json").write_text(json.dumps(document, indent=1) + "\n")
    return 3 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
