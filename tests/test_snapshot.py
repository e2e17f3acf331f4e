"""Memory snapshots of torch: read without running anything, to the byte, and written for viewers.

tests/data holds snapshots that torch 2.11 recorded of three training steps on an H200, and what its
allocator counted at that moment.
"""

import gzip
import itertools
import json
import pickle
import pickletools
import random
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.cuda import _memory_viz

from pytracer import LoadedTrace, errors, load, trace as record
from pytracer.analysis.allocator import blocks
from pytracer.analysis.answers import breakdown
from pytracer.analysis.answers.diff import diff
from pytracer.analysis.facts import devices, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.grouping import role_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTIONS, CATEGORIES
from pytracer.export import snapshot as export
from pytracer.export.table import render
from tests.csrc.make_snapshot_corpus import Calls, snapshot as small
from tests.test_analysis_categories import programs
from tests.test_analysis_damaged import damaged
from tests.trace_builder import TraceBuilder, training_step

DATA = Path(__file__).parent / "data"
COUNTERS = json.loads((DATA / "snapshot-counters.json").read_text())
RECORDED = ("plain", "expandable", "native", "ring")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Also for tests that hypothesis runs again and again."""
    return tmp_path_factory.mktemp("snapshots")


def recorded_bytes(name: str) -> bytes:
    return gzip.decompress((DATA / f"snapshot-{name}.pickle.gz").read_bytes())


@pytest.fixture(scope="module")
def recorded(folder: Path) -> dict[str, LoadedTrace]:
    """The real snapshots, read."""
    found = {}
    for name in RECORDED:
        path = folder / f"{name}.pickle"
        path.write_bytes(recorded_bytes(name))
        found[name] = load(path)
    return found


def read(data: bytes | dict[str, Any], folder: Path) -> LoadedTrace:
    path = folder / "one.pickle"
    path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data, protocol=4))
    return load(path)


def levels(trace: Trace) -> dict[str, list[int]]:
    """Each device's bytes before the first change and after every one."""
    found = {}
    for device in usage.devices(trace):
        _, changes, at_start = usage.levels_of(trace, device)
        found[device] = [at_start, *changes.tolist()]
    return found


# ---------------------------------------------------------------- reading torch's own


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_alive_at_the_end_is_what_the_allocator_counted(
    name: str, recorded: dict[str, LoadedTrace]
) -> None:
    trace, counted = recorded[name], COUNTERS[name]
    assert trace.summary()["at_end"].sum() == counted["requested_bytes.all.current"]
    data = trace.data
    alive = usage.alive(data, "end")
    found = blocks.device_bytes(data, alive, len(data.events.ticks) - 1, "cuda:0")
    assert found.allocated == counted["allocated_bytes.all.current"]
    assert found.reserved == counted["reserved_bytes.all.current"]
    assert trace.health().empty


@pytest.mark.parametrize("name", ["plain", "expandable", "native"])
def test_a_whole_history_has_the_allocators_peak(
    name: str, recorded: dict[str, LoadedTrace]
) -> None:
    assert recorded[name].peak.bytes == COUNTERS[name]["requested_bytes.all.peak"]


@pytest.mark.parametrize("asked", ["", "expandable_segments:True"])
def test_what_the_allocator_was_asked_for_goes_out_and_comes_back(
    asked: str, tmp_path: Path
) -> None:
    ours = load(Path(__file__).parent / "data" / "h200.pytrace")
    ours.data.meta["allocator_settings"] = asked
    back = load(ours.export_memory_snapshot(tmp_path / "out.pickle"))
    for trace in (ours.data, back.data):
        assert devices.expandable(trace, "cuda:0") == bool(asked)


def test_every_level_is_what_the_plain_sum_of_the_entries_says(
    recorded: dict[str, LoadedTrace],
) -> None:
    for name in RECORDED:
        whole = pickle.loads(recorded_bytes(name))  # our own file
        entries = whole["device_traces"][0]
        level = COUNTERS[name]["requested_bytes.all.current"]
        expected = [level]
        for entry in reversed(entries):
            if entry["action"] == "alloc":
                level -= entry["size"]
            elif entry["action"] == "free_completed":
                level += entry["size"]
            else:
                continue
            expected.append(level)
        assert levels(recorded[name].data) == {"cuda:0": expected[::-1]}


def test_frames_say_phases_and_some_categories(recorded: dict[str, LoadedTrace]) -> None:
    """The three training steps, whether frames are Python's alone or also C++'s."""
    for name in ("plain", "expandable", "native"):
        trace = recorded[name]
        assert len(trace.steps()) == 3, name
        assert (trace.steps()["micro_steps"] == 1).all()
        assert trace.peak.phase == "backward"
        own_peak = trace.summary()["own_peak"]
        # AdamW's two moments are twice the gradients; its counts are four bytes each.
        gradients = int(own_peak["gradients"])
        assert 2 * gradients <= own_peak["optimizer_state"] < 2 * gradients + 4096
        assert own_peak["activations"] > 0
        assert own_peak["unknown"] >= gradients  # the weights are older than the history
        assert trace.allocations()["line"].dropna().str.contains("record_snapshots.py").all()


def test_the_same_program_differs_in_nothing_but_addresses(
    recorded: dict[str, LoadedTrace],
) -> None:
    keys = ("category", "line", "phase")
    found = diff(recorded["plain"].data, recorded["expandable"].data, keys)
    assert {row.kind for row in found.rows} == {"same"}


def test_every_view_and_export_works_on_other_peoples_files(
    recorded: dict[str, LoadedTrace], tmp_path: Path
) -> None:
    trace = recorded["plain"]
    trace.timeline(), trace.by("module"), trace.bytes_per_parameter()
    assert "<svg" in trace._repr_html_()
    assert trace.export_chrome_trace(tmp_path / "x.json.gz").events > 1000
    saved = load(trace.save(tmp_path / "x.pytrace"))
    assert levels(saved.data) == levels(trace.data)
    assert str(saved) == str(trace)


def test_without_frames_everything_is_unknown(folder: Path) -> None:
    whole = pickle.loads(recorded_bytes("plain"))
    for entry in whole["device_traces"][0]:
        del entry["frames"]
    whole["external_annotations"] = []
    peak = read(whole, folder).peak
    assert (
        peak.by_category["unknown"] == peak.bytes == COUNTERS["plain"]["requested_bytes.all.peak"]
    )


def test_what_happened_after_the_history_ended_happens_at_the_end(folder: Path) -> None:
    """Totals are those of the segments, and it is said that something was not seen."""
    whole = pickle.loads(recorded_bytes("plain"))
    del whole["device_traces"][0][-40:]
    trace = read(whole, folder)
    assert trace.summary()["at_end"].sum() == COUNTERS["plain"]["requested_bytes.all.current"]
    assert "after_history" in trace.health().index


def test_files_of_old_versions_are_read(folder: Path) -> None:
    """torch 2.0 had no times, and wrote a block's frames and size into its history."""
    history = [{"real_size": 300, "frames": [], "addr": 4096}]
    block = {"size": 512, "state": "active_allocated", "history": history}
    segment = {"device": 0, "address": 4096, "total_size": 1024, "stream": 0}
    rest = {"size": 512, "state": "inactive"}
    alloc = {"action": "alloc", "addr": 4096, "size": 300, "stream": 0}
    old = {"segments": [{**segment, "blocks": [block, rest]}], "device_traces": [[alloc]]}
    trace = read(old, folder)
    assert trace.peak.bytes == 300
    assert trace.summary()["at_end"].sum() == 300
    alone = read(pickle.dumps(old["segments"], protocol=2), folder)
    assert alone.peak.bytes == 300


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_since_2_is_read(protocol: int, folder: Path) -> None:
    assert read(small(protocol=protocol), folder).summary()["at_end"].sum() == 400


def test_notes_about_live_blocks_are_no_loss(folder: Path) -> None:
    """torch 2.14 writes an entry for each call of `torch.cuda.memory._annotate_memory`."""
    whole = pickle.loads(recorded_bytes("plain"))
    plain = read(whole, folder)
    note = {**whole["device_traces"][0][-1], "action": "annotate", "user_metadata": "kept"}
    whole["device_traces"][0].insert(40, note)
    noted = read(whole, folder)
    assert noted.peak.bytes == plain.peak.bytes
    assert "unknown_actions" not in noted.health().index
    note["action"] = "of a later torch"
    assert "unknown_actions" in read(whole, folder).health().index


def test_two_devices_are_told_apart(folder: Path) -> None:
    whole = pickle.loads(recorded_bytes("plain"))
    second = pickle.loads(recorded_bytes("ring"))
    for segment in second["segments"]:
        segment["device"] = 1
    whole["device_traces"] = [*whole["device_traces"][:1], second["device_traces"][0]]
    whole["segments"] += second["segments"]
    found = levels(read(whole, folder).data)
    assert found.keys() == {"cuda:0", "cuda:1"}
    assert max(found["cuda:0"]) == COUNTERS["plain"]["requested_bytes.all.peak"]
    assert found["cuda:1"][-1] == COUNTERS["ring"]["requested_bytes.all.current"]


# ---------------------------------------------------------------- hostile files


class Opens:
    """Its pickle makes a file when Python reads it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_code_is_refused_and_does_not_run(protocol: int, tmp_path: Path) -> None:
    path, made = tmp_path / "evil.pickle", tmp_path / "made"
    path.write_bytes(pickle.dumps({"segments": [Opens(made)]}, protocol=protocol))
    with pytest.raises(errors.UnreadableTrace) as caught:
        load(path)
    assert not made.exists()
    assert "\n" not in str(caught.value)
    if protocol >= 2:
        assert "open" in str(caught.value)
        assert "do not open this file with pickle" in str(caught.value)


def bombs() -> dict[str, bytes]:
    doubled = b"\x80\x04]\x94" + b"(h\x00h\x00e" * 0
    for i in range(40):  # a list of two of the list before: 2 ** 40 items
        doubled += b"](" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"e\x94"
    head = b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces"
    entry = b"}(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x08\x8c\x04sizeK\x07u"
    return {
        "memo": b"\x80\x04Nr\x00\xc2\xeb\x0b.",
        "deep": b"\x80\x04" + b"(" * 1_000_000,
        "deep lists": b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
        "doubling": doubled + b".",
        "long text": b"\x80\x04X\xff\xff\xff\x7f.",
        "long number": b"\x80\x04\x8b\x00\x00\x10\x00" + b"\x01" * (1 << 20) + b".",
        "empty lists": b"\x80\x04(" + b"]" * 4_000_000 + b"l.",
        "one entry for all": head + b"](](" + entry + b"\x94" + b"h\x00" * 1_000_000 + b"eeu.",
        "code": pickle.dumps(Calls()),
        "nothing": b"\x80\x04.",
        "zeros": b"\x80\x04" + bytes(1_000_000),
    }


@pytest.mark.parametrize("name", list(bombs()))
def test_bombs_are_refused_at_once(name: str, folder: Path) -> None:
    began = time.monotonic()
    with pytest.raises(errors.UnreadableTrace, match=r"one\.pickle: ") as caught:
        read(bombs()[name], folder)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 5


def test_many_segments_take_no_longer_than_many_of_anything(folder: Path) -> None:
    """Segments that come and go, each of another size: thirty thousand of them."""
    trace = [
        {"action": action, "addr": (i * 7919 % 30_000) << 12, "size": 4096 + i % 9, "stream": 0}
        for i in range(15_000)
        for action in ("segment_map", "segment_unmap")
    ]
    began = time.monotonic()
    again = read({"segments": [], "device_traces": [trace]}, folder)
    again.export_memory_snapshot(folder / "many.pickle", overwrite=True)
    assert time.monotonic() - began < 10


def test_bombs_take_little_memory(folder: Path) -> None:
    """At most a few tens of bytes per byte of the file."""
    script = """
import resource, sys
from pytracer import errors, load
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        load(path)
    except errors.UnreadableTrace:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    paths = []
    for number, data in enumerate(bombs().values()):
        paths.append(folder / f"bomb{number}.pickle")
        paths[-1].write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, paths)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 300_000  # KiB; the largest bomb is 4 MB


def test_a_file_that_was_cut_short_is_refused(folder: Path) -> None:
    whole = recorded_bytes("ring")
    for end in random.Random(0).sample(range(2, len(whole)), 60):
        with pytest.raises(errors.UnreadableTrace):
            read(whole[:end], folder)


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_damage_gives_a_trace_or_one_clear_line(folder: Path, data: st.DataObject) -> None:
    whole = bytearray(small(6))
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(2, len(whole) - 1))
        whole[at] = data.draw(st.sampled_from([0, 1, 0x28, 0x4E, 0x5D, 0x71, 0x80, 0xFF]))
    path = folder / "damaged.pickle"
    path.write_bytes(whole)
    try:
        trace = load(path)
    except errors.UnreadableTrace as error:
        said = str(error)
    else:
        said = ""
        render(trace.data)
        trace.steps(), trace.allocations()
    assert "\n" not in said


# ---------------------------------------------------------------- writing


def training() -> Trace:
    b = TraceBuilder()
    weight = b.seed(3 << 20)
    b.label(weight, "weights", "parameter", "h.0.weight", "786432", "float32")
    for _ in range(2):
        training_step(b, weight, layers=4, activation=5 << 20)
    b.alloc(7)
    return b.trace()


def written(trace: Trace, folder: Path) -> dict[str, Any]:
    """The whole snapshot; Python's own reader insists that the pickle's frames are right."""
    path = export.write(trace, folder / "written.pickle", overwrite=True)
    with path.open("rb") as file:
        found: dict[str, Any] = pickle._Unpickler(file).load()  # type: ignore[attr-defined]
    return found


def plain_entries(trace: Trace, device: str) -> list[dict[str, Any]]:
    """What the native side writes, in slow Python: every allocation, free, segment and failure."""
    alloc, events, places = allocations(trace), trace.events, trace.places
    names = devices.device_of_place(trace)
    rows: list[tuple[int, int, int, str]] = []
    for row in range(len(alloc)):
        if names[alloc.place[row]] == device:
            ends = ((alloc.end[row], 0), (alloc.completed[row], 1))
            rows += [
                (int(at), rank, row, ("free_requested", "free_completed")[rank])
                for at, rank in ends
                if at >= 0
            ]
            rows.append((int(alloc.start[row]), 2, row, "alloc"))
    for i, action in enumerate(events.action.tolist()):
        if ACTIONS[action] in export._OTHERS and names[events.place[i]] == device:
            rows.append((i, 0, i, ACTIONS[action]))
    found = []
    for position, _, row, action in sorted(rows):
        block = action in ("alloc", "free_requested", "free_completed")
        of, size = (alloc, alloc.requested_bytes) if block else (events, events.bytes)
        place = of.place[row]
        ticks = events.ticks[max(position, 0) : max(position, 0) + 1]
        entry = {
            "action": action,
            "device_free" if action == "oom" else "addr": int(of.address[row]),
            "size": int(size[row]),
            "stream": int(places.stream[place]),
            "time_us": int(trace.time_ns(ticks)[0] + trace.began_unix_ns) // 1000,
            "compile_context": "N/A",
            "pool_id": (int(places.pool_high[place]), int(places.pool_low[place])),
            "user_metadata": "",
            "frames": [],
        }
        if action == "alloc":
            role, label = role_text(trace, int(alloc.role[row])), alloc.label[row]
            name = trace.strings[trace.labels.name[label]]
            of_module = trace.strings[alloc.cause("module")[row]]
            words = (role, name, of_module, trace.strings[alloc.op[row]])
            entry["user_metadata"] = " · ".join(filter(None, words))
            entry["category"] = CATEGORIES[alloc.category[row]]
            entry["pytracer"] = f"{role}\n{name}"
            first = {"name": entry["user_metadata"], "filename": entry["category"], "line": 0}
            entry["frames"] = [first]
        found.append(entry)
    return found


@given(programs)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_entries_are_those_of_the_plain_reference(folder: Path, builder: Trace) -> None:
    traces = written(builder, folder)["device_traces"]
    names = export._device_names(builder)
    assert len(traces) == len(names)
    for name, entries in zip(names, traces, strict=True):
        for entry in entries:
            del entry["frames"][1:]  # the stacks
        assert entries[:-1] == plain_entries(builder, name)
        assert entries[-1]["category"] == "unknown"


def test_long_snapshots_are_written_in_pieces(tmp_path: Path, monkeypatch: Any) -> None:
    """However small the pieces, and over thousands of entries and texts: the same file."""
    b = TraceBuilder()
    for i in range(3000):
        b.label(b.alloc(i + 1), "weights", "parameter", f"layer.{i % 300}.weight", "1", "float32")
    whole = written(b.trace(), tmp_path)
    for events in (1, 7, 1000):
        monkeypatch.setattr(export, "_CHUNK", events)
        assert written(b.trace(), tmp_path) == whole
    entries = written(b.trace(), tmp_path)["device_traces"][0]
    assert [entry["size"] for entry in entries[:-1]] == [*range(1, 3001)]
    assert len({id(entry["frames"]) for entry in entries[:-1]}) == 300  # shared, not repeated


def test_blocks_of_absurd_sizes_that_adjoin_are_read_back(tmp_path: Path) -> None:
    """As a damaged trace may have them: their segment is larger than any block can be."""
    b = TraceBuilder()
    for i in range(3):
        b.alloc(2**47, address=2**20 + i * 2**47)
    path = export.write(b.trace(), tmp_path / "x.pickle")
    same_totals(b.trace(), load(path))


def test_a_block_that_is_rounded_up_beyond_what_an_event_can_say_is_read_back(
    tmp_path: Path,
) -> None:
    b = TraceBuilder()
    b.alloc(2**48 - 1, address=2**20)
    path = export.write(b.trace(), tmp_path / "x.pickle")
    same_totals(b.trace(), load(path))


def test_free_memory_larger_than_an_event_can_say_is_read_back(tmp_path: Path) -> None:
    """Between two blocks of one segment, which two segments that adjoin have become."""
    b = TraceBuilder()
    for i in range(3):
        b._event("segment_map", b._block(0, 2**20 + i * 2**47, device="cuda:0"), 2**47)
    b.alloc(512, address=2**20, device="cuda:0")
    b.alloc(512, address=2**20 + 3 * 2**47 - 512, device="cuda:0")
    path = export.write(b.trace(), tmp_path / "x.pickle")
    same_totals(b.trace(), load(path))


def test_it_is_plain_data_of_protocol_4(tmp_path: Path) -> None:
    """Nothing that a viewer written in JavaScript would not know."""
    path = export.write(training(), tmp_path / "x.pickle")
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(path.read_bytes())}
    assert not opcodes & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ", "BININT8"}
    assert path.read_bytes()[:2] == b"\x80\x04"


def test_categories_are_there_and_unknown_is_one_of_them(tmp_path: Path) -> None:
    """memory_viz breaks if there are categories and none of them is "unknown"."""
    entries = written(training(), tmp_path)["device_traces"][0]
    seen = {entry["category"] for entry in entries if "category" in entry}
    assert {"weights", "activations", "gradients", "unknown"} <= seen
    weight = next(entry for entry in entries if entry.get("category") == "weights")
    assert weight["frames"][0]["filename"] == "weights"
    assert "parameter · h.0.weight" in weight["frames"][0]["name"]


def test_frees_follow_their_requests(tmp_path: Path) -> None:
    """The viewer joins the two only if they are neighbours."""
    entries = written(training(), tmp_path)["device_traces"][0]
    for one, next_one in itertools.pairwise(entries):
        if one["action"] == "free_requested":
            assert (next_one["action"], next_one["addr"]) == ("free_completed", one["addr"])


def same_totals(trace: Trace, again: LoadedTrace) -> None:
    assert levels(again.data) == levels(trace)
    for device in usage.devices(trace):
        before = {row.category: row for row in breakdown.category_rows(trace, device)}
        after = {row.category: row for row in breakdown.category_rows(again.data, device)}
        assert after == before


@given(programs)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_what_is_read_back_has_the_same_totals_at_every_event(folder: Path, builder: Trace) -> None:
    path = export.write(builder, folder / "again.pickle", overwrite=True)
    same_totals(builder, load(path))
    _memory_viz.segsum(pickle.loads(path.read_bytes()))


@pytest.mark.parametrize("name", RECORDED)
def test_real_snapshots_come_back_as_they_were(
    name: str, recorded: dict[str, LoadedTrace], tmp_path: Path
) -> None:
    before = recorded[name]
    again = load(before.export_memory_snapshot(tmp_path / "x.pickle"))
    same_totals(before.data, again)
    whole = pickle.loads(recorded_bytes(name))
    written = pickle.loads((tmp_path / "x.pickle").read_bytes())
    for key in ("total_size", "allocated_size", "active_size", "requested_size"):
        assert sum(s[key] for s in written["segments"]) == sum(s[key] for s in whole["segments"])
    phases = before.by("phase")["bytes"].to_dict()
    assert {
        k: v for k, v in again.by("phase")["bytes"].items() if k in ("forward", "backward")
    } == {k: v for k, v in phases.items() if k in ("forward", "backward")}


def test_a_trace_of_the_cpu_comes_back(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with record(model, optimizer, devices="cpu", stacks=True, table=False) as t:
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    again = load(t.export_memory_snapshot(tmp_path / "x.pickle"))
    same_totals(t.data, again)
    assert usage.devices(again.data) == ("cpu",)
    assert any("test_snapshot.py" in line for line in again.by("line").index.dropna())


@given(damaged())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_damaged_traces_are_written_and_viewers_read_them(folder: Path, trace: Trace) -> None:
    whole = written(trace, folder)
    # Torch draws a character for each 20 MiB, also of a segment that claims 2^60 bytes.
    if sum(segment["total_size"] for segment in whole["segments"]) < 1 << 44:
        _memory_viz.segsum(whole)
    _memory_viz.trace(whole)
    pickle.dumps(whole, protocol=4)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_torchs_own_tools_accept_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m torch.cuda._memory_viz stats|segments|...`, as people run them."""
    path = export.write(training(), tmp_path / "x.pickle")
    script = tmp_path / ".cache" / "flamegraph.pl"  # it would be downloaded
    script.parent.mkdir()
    script.write_text("#!/bin/sh\ncat\n")
    script.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    for command in ("stats", "trace", "segments", "memory", "trace_plot", "segment_plot"):
        output = [] if command in ("stats", "trace") else ["-o", str(tmp_path / command)]
        monkeypatch.setattr(sys, "argv", ["_memory_viz", command, str(path), *output])
        runpy.run_module("torch.cuda._memory_viz", run_name="__main__")
    assert "total_allocated: 3.0MiB" in capsys.readouterr().out
    assert "weights:0:parameter · h.0.weight" in (tmp_path / "segments").read_text()


def test_nothing_is_overwritten_and_nothing_half_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    path.write_text("mine")
    with pytest.raises(errors.CannotWrite, match="overwrite=True"):
        export.write(training(), path)
    assert path.read_text() == "mine"
    with pytest.raises(errors.CannotWrite):
        export.write(training(), tmp_path / "missing" / "x.pickle")
    assert [p.name for p in tmp_path.iterdir()] == ["x.pickle"]


def test_live_blocks_are_annotated_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later torches can; of this one it is said that it cannot. Blocks that are gone do not count."""
    from torch.cuda import memory

    b = TraceBuilder()
    weight, gone = b.seed(8, device="cuda:0"), b.alloc(8, device="cuda:0")
    freed, unknown = b.alloc(8, device="cuda:0"), b.alloc(8, device="cuda:0")
    b.label(weight, "weights", "parameter", "h.0.weight", "2", "float32")
    b.free(freed)
    traced = record()
    traced._data = b.trace()
    monkeypatch.delattr(memory, "_annotate_memory", raising=False)
    with pytest.raises(errors.UsageError, match="cannot annotate"):
        traced.annotate_memory_history()
    said: dict[int, str] = {}

    def annotate(address: int, text: str) -> None:
        if address == gone.address:
            raise RuntimeError("not a live allocation")
        said[address] = text

    monkeypatch.setattr(memory, "_annotate_memory", annotate, raising=False)
    assert traced.annotate_memory_history() == 2
    assert said[weight.address] == "weights · parameter · h.0.weight"
    assert said.keys() == {weight.address, unknown.address}


@pytest.mark.cuda
def test_a_snapshot_of_this_gpu_says_what_its_allocator_says(tmp_path: Path) -> None:
    import torch

    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        model = torch.nn.Linear(512, 512, device="cuda")
        model(torch.randn(64, 512, device="cuda")).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.memory._dump_snapshot(str(tmp_path / "x.pickle"))
        counted = torch.cuda.memory_stats()["requested_bytes.all.current"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert load(tmp_path / "x.pickle").summary()["at_end"].sum() == counted
