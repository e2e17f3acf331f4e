"""Measures the report's page: its size, and how long a browser takes to show and move it.

    python benchmarks/report.py [--allocations 100000 1000000] [--write]

The trace is synthetic: training steps of a transformer with sizes, addresses and times as irregular
as an allocator's. Needs chromium and playwright. Targets, for a million allocations on 2 cores: a
page of 12 MB, first paint 0.3 s, interactive 1.5 s, a picture after panning or zooming within 50 ms
(95 of 100), and the block under the mouse within 16 ms. `each` is the picture of every bar, once what
is seen rests. On a busy machine all of it takes longer: `slowdown` is how much longer a loop took that
only computes, and `cpu` is processor time of the browser's process for the page, which others do not
change much. `benchmarks/readme_tables.py` writes the table of docs/report.md.
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
from pytracer.data.recorded import Trace
from pytracer.export import report

RESULTS = Path(__file__).parent / "results"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
TARGETS = {"mb": 12.0, "first_paint_s": 0.3, "interactive_s": 1.5, "pan_zoom_p95_ms": 50.0}
TARGETS |= {"hover_p95_ms": 16.0}
ROUNDS = 5  # of opening the page; the median counts


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
    made, ended = np.flatnonzero(start >= 0), np.flatnonzero(end >= 0)
    position = np.concatenate([end[ended], start[made]])
    which = np.concatenate([ended, made])
    order = np.argsort(position, kind="stable")
    rooms = -(-sizes // 512) * 512
    free: dict[int, list[int]] = {}
    places: dict[int, int] = {}
    top = 1 << 32
    for some in np.array_split(order, max(len(order) // 1_000_000, 1)):
        placed = []
        begins = (some >= len(ended)).tolist()
        for i, is_made, room in zip(
            which[some].tolist(), begins, rooms[which[some]].tolist(), strict=True
        ):
            if not is_made:
                place = places.pop(i)
                free.setdefault(room, []).append(place)
            elif same := free.get(room):
                place = places[i] = same.pop()
            else:
                place = places[i] = top
                top += room
            placed.append(place)
        address[position[some]] = placed


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
    row: dict[str, Any] = {
        "taken": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "allocations": len(lifetimes.lifetimes(trace).start),
        "mb": round(page.stat().st_size / 1e6, 2),
        "written_cpu_s": round(wrote, 2),
    }
    peak = usage.peak(trace).bytes
    del trace
    return row | _in_browser(page, peak)


def _in_browser(page: Path, peak: int) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        processes = browser.new_browser_cdp_session()
        rounds = [_open(browser, processes, page, peak) for _ in range(ROUNDS)]
        moved = _move(rounds[-1]["tab"], processes)
        browser.close()

    def median(name: str, digits: int = 3) -> float:
        return round(statistics.median(row[name] for row in rounds), digits)

    return {
        "first_paint_s": median("first"),
        "interactive_s": median("ready"),
        "interactive_cpu_s": median("cpu", 2),
        "interactive_slowdown": median("slowdown", 2),
        **moved,
    }


def _processor_s(processes: Any) -> dict[int, float]:
    """Returns the processor time of each page's process so far."""
    rows = processes.send("SystemInfo.getProcessInfo")["processInfo"]
    return {row["id"]: float(row["cpuTime"]) for row in rows if row["type"] == "renderer"}


def _busiest(processes: Any, before: dict[int, float]) -> float:
    """Returns the processor time since then of the page that took most: the one that is measured."""
    now = _processor_s(processes)
    return max(seconds - before.get(process, 0.0) for process, seconds in now.items())


def _open(browser: Any, processes: Any, page: Path, peak: int) -> dict[str, Any]:
    slow = slowdown()
    tab = browser.new_page(viewport={"width": 1600, "height": 1000})
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    began = _processor_s(processes)
    tab.goto(page.as_uri(), wait_until="commit")
    tab.wait_for_selector("html[data-ready]", state="attached", timeout=120_000)
    took = _busiest(processes, began)
    assert tab.locator(".status").get_attribute("data-bytes") == str(peak)
    assert all(url.startswith(("file:", "blob:")) for url in requests), requests
    first = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    ready = tab.evaluate("performance.getEntriesByName('interactive')[0].startTime")
    slow = (slow + slowdown()) / 2
    return {"tab": tab, "first": first / 1e3, "ready": ready / 1e3, "cpu": took, "slowdown": slow}


def _move(tab: Any, processes: Any) -> dict[str, Any]:
    """Pans, zooms and hovers over each allocation, from the whole trace to a few events."""
    tab.click("#tab-map")
    tab.locator("canvas.map").scroll_into_view_if_needed()
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("f")
    tab.wait_for_selector("canvas.map[data-drawn=each]")
    tab.wait_for_timeout(1500)
    tab.evaluate("performance.clearMeasures()")
    slow, began = slowdown(), _processor_s(processes)
    for key in ("d", "a", *"wwdaswdawwwdadwwwwdadwwwwwwdad", "f", "w", "s"):
        tab.keyboard.press(key)
        tab.wait_for_timeout(120)
    draws = _durations(tab, "draw")
    took = _busiest(processes, began)
    tab.evaluate("performance.clearMeasures()")
    for key in "fasda":
        tab.keyboard.press(key)
        tab.wait_for_timeout(1000)
    each = _durations(tab, "drawEach") or [0.0]
    slow = (slow + slowdown()) / 2
    tab.evaluate("performance.clearMeasures()")
    box = tab.locator("canvas.map").bounding_box()
    for i in range(60):
        tab.mouse.move(box["x"] + 90 + i * 11, box["y"] + 10 + (i * 37) % (box["height"] - 20))
        tab.wait_for_timeout(30)
    hovers = _durations(tab, "hover")
    return {
        "pan_zoom_p50_ms": round(statistics.median(draws), 1),
        "pan_zoom_p95_ms": round(float(np.percentile(draws, 95)), 1),
        "pan_zoom_cpu_ms": round(1000 * took / len(draws), 1),
        "pan_zoom_slowdown": round(slow, 2),
        "each_p95_ms": round(float(np.percentile(each, 95)), 1),
        "hover_p50_ms": round(statistics.median(hovers), 1),
        "hover_p95_ms": round(float(np.percentile(hovers, 95)), 1),
    }


def _durations(tab: Any, name: str) -> list[float]:
    found: list[float] = tab.evaluate(
        f"performance.getEntriesByName('{name}').map((entry) => entry.duration)"
    )
    return found


def _write(rows: list[dict[str, Any]]) -> None:
    """Puts the rows into the results. Rows of other sizes stay, each with its own date."""
    path = RESULTS / "report-cpu.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    measured = {row["allocations"] for row in rows}
    others = [row for row in known if row["allocations"] not in measured]
    document = {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "targets": TARGETS,
        "rows": sorted([*others, *rows], key=lambda row: int(row["allocations"])),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Measures the pages. Returns exit code 3 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--allocations", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000]
    )
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
        _write(rows)
    return 3 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
