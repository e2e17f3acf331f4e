"""Files that end early, are damaged, or are put together from others: what is shown of them is so."""

import json
import random
import struct
from pathlib import Path

import pytest

from pytracer import errors, load
from pytracer.reading.views import LoadedTrace, read
from tests import kills, mutations
from tests.mutations import CHUNK_HEADER, DATA, HEADER, Seed
from tests.test_diff import training
from tests.tiers import by_tier

# Recorded by version 1.0 of the format: four times its thread wrote what six steps had left.
OLD = DATA / "streamed-1.0.pytrace"
EVENTS, CLOCK = 9, 2


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return training().trace().save(tmp_path / "run.pytrace")


def cut(path: Path, size: int) -> Path:
    """The same file without its last bytes."""
    path.write_bytes(path.read_bytes()[:-size])
    return path


def chunks_of(path: Path) -> list[bytes]:
    return Seed(path.name, path.read_bytes()).chunks


def table_of(chunk: bytes) -> int:
    return int(struct.unpack_from("<H", chunk, 8)[0])


# ---------------------------------------------------------------- many kills, many mutations


@pytest.mark.ci
@pytest.mark.slow
def test_a_killed_recordings_finished_steps_are_those_of_one_that_was_not_killed(
    tmp_path: Path,
) -> None:
    """Killed at random instants, and each file cut at 5 places where a kill may have cut it."""
    count = by_tier(5, 10, 20)  # tools/kills.py: 200
    rng = random.Random(0)
    longest, steps = by_tier(400, 800, 800) / 1000, by_tier(800, 1500, 1500)
    delays = [rng.uniform(0.0, longest) for _ in range(count)]
    kills.kill_recordings(tmp_path, delays, steps=steps)
    found = list(kills.compare(tmp_path, cuts=5, seed=0))
    assert [each for each in found if each.wrong] == []
    assert len(found) == count * 6
    assert sum(each.finished_steps > 0 for each in found) > count  # else little was compared


@pytest.mark.ci
@pytest.mark.slow
def test_a_damaged_file_is_refused_or_says_so_or_has_the_same_totals(tmp_path: Path) -> None:
    """Of every kind, through every view, command and export."""
    count = by_tier(50, 80, 600)  # tools/mutations.py: 10,000
    report = mutations.run(tmp_path, first=0, count=count, processes=2)
    assert report.problems == []
    assert report.tried == count
    assert report.most_memory < 3 << 29  # torch, pandas and pyarrow alone are half of it
    outcomes = {outcome.rpartition(": ")[2] for outcome in report.outcomes}
    assert outcomes - {"imported"} == {"refused", "truncated", "corrupt", "complete"}


# ---------------------------------------------------------------- files of version 1.0


def test_a_file_of_the_old_format_is_read_whole() -> None:
    loaded = load(OLD)
    assert (loaded.file_report["status"], loaded.file_report["version"]) == ("complete", "1.0")
    steps = loaded.steps()
    assert steps.allocations.tolist() == [26] + [31] * 23
    assert steps.growth_bytes.tolist() == [1696] + [400 + 4 * step for step in range(23)]
    assert len(loaded.health()) == 0


def test_of_an_old_file_that_was_killed_no_step_is_shown_whose_events_are_missing(
    tmp_path: Path,
) -> None:
    """Scopes were written before their events: steps 18 to 23 are there, and what they did is not."""
    chunks = chunks_of(OLD)
    last = [number for number, chunk in enumerate(chunks) if table_of(chunk) == EVENTS][3]
    path = tmp_path / "killed.pytrace"
    path.write_bytes(OLD.read_bytes()[:HEADER] + b"".join(chunks[:last]))
    killed = read(path)
    assert killed.steps()[kills.TOTALS].equals(load(OLD).steps()[kills.TOTALS][:18])
    assert killed.file_report["lost"].keys() == {"scope_begins", "scope_ends"}
    assert any("later than the last event" in note for note in killed.file_report["notes"])


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_reading_of_the_clock_that_is_repeated_is_damage(place: str, tmp_path: Path) -> None:
    """Times, and with them phases and categories, are by the first and the last reading."""
    chunks = chunks_of(OLD)
    readings = [chunk for chunk in chunks if table_of(chunk) == CLOCK]
    if place == "first":
        chunks.insert(0, readings[-1])
    else:
        chunks.insert(len(chunks) - 1, readings[0])
    path = tmp_path / "repeated.pytrace"
    path.write_bytes(OLD.read_bytes()[:HEADER] + b"".join(chunks))
    assert read(path).file_report["status"] == "corrupt"


# ---------------------------------------------------------------- who is told


def assert_told(loaded: LoadedTrace, name: str) -> None:
    row = loaded.health().loc[name]
    assert row.severity == "loss"
    assert row.meaning in " ".join(str(loaded).split())


def test_a_truncated_file_is_told_of_by_a_warning_by_health_and_by_the_table(saved: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"run\.pytrace: the file ends before") as told:
        loaded = load(cut(saved, 20))
    assert told[0].filename == __file__
    assert_told(loaded, "truncated_file")


def test_a_corrupt_file_is_told_of_by_a_warning_by_health_and_by_the_table(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[HEADER + CHUNK_HEADER + 20] ^= 1
    saved.write_bytes(content)
    with pytest.warns(RuntimeWarning, match=r"run\.pytrace: parts of the file are damaged"):
        loaded = load(saved)
    assert_told(loaded, "corrupt_file")


def test_a_truncated_trace_that_is_saved_again_still_says_so(saved: Path, tmp_path: Path) -> None:
    again = read(cut(saved, 20)).save(tmp_path / "again.pytrace")
    assert read(again).file_report["status"] == "complete"
    assert_told(read(again), "truncated_file")


def test_a_whole_file_is_told_of_by_nobody(saved: Path) -> None:
    loaded = load(saved)  # a warning is an error here
    assert len(loaded.health()) == 0
    assert "file" not in str(loaded)


def test_a_file_in_which_nothing_is_left_is_no_trace(saved: Path) -> None:
    with pytest.raises(errors.UnreadableTrace, match="nothing that happened is left") as refused:
        load(cut(saved, saved.stat().st_size - HEADER - 100))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("document", ["[", "null", "[]", '"x"', '{"pid": }'])
def test_a_meta_document_that_is_none_is_told_of(document: str, saved: Path) -> None:
    chunks = chunks_of(saved)
    chunks[0] = mutations.meta_chunk(document.encode())
    saved.write_bytes(saved.read_bytes()[:HEADER] + b"".join(mutations.with_chain(chunks)))
    loaded = load(saved)
    assert loaded.data.meta == {}
    assert loaded.health().loc["unreadable_meta"].severity == "loss"


def test_half_a_character_in_the_meta_document_is_written_out(saved: Path) -> None:
    chunks = chunks_of(saved)
    document = rb'{"cuda_problem": "\ud800", "command": ["\udcff.py"]}'
    chunks[0] = mutations.meta_chunk(document)
    saved.write_bytes(saved.read_bytes()[:HEADER] + b"".join(mutations.with_chain(chunks)))
    loaded = load(saved)
    assert loaded.health().loc["no_cuda_events", "meaning"] == r"\ud800"
    assert loaded.data.meta["command"] == ["\udcff.py"], "a file's name, to be opened again"


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_meta_document_that_nests_without_end_is_damage(opening: str, saved: Path) -> None:
    chunks = chunks_of(saved)
    chunks[0] = mutations.meta_chunk(opening.encode() * 100_000)
    saved.write_bytes(saved.read_bytes()[:HEADER] + b"".join(mutations.with_chain(chunks)))
    loaded = read(saved)
    assert loaded.data.meta == {}
    assert loaded.file_report["status"] == "corrupt"
    json.dumps(loaded.file_report)


# ---------------------------------------------------------------- chunks of another recording


def status(path: Path) -> str:
    try:
        return str(read(path).file_report["status"])
    except errors.UnreadableTrace:
        return "refused"


def test_a_chunk_of_another_recording_is_damage_wherever_it_is(saved: Path, tmp_path: Path) -> None:
    """Its checksums are right, and its row numbers may be."""
    other = training(activation=5000).trace().save(tmp_path / "other.pytrace")
    own, content = chunks_of(saved), saved.read_bytes()
    for foreign in chunks_of(other):
        for place in range(len(own) + 1):
            between = [*own[:place], foreign, *own[place:]]
            instead = [*own[:place], foreign, *own[place + 1 :]]
            for chunks in (between, instead):
                if chunks != own:
                    saved.write_bytes(content[:HEADER] + b"".join(chunks))
                    assert status(saved) != "complete", (table_of(foreign), place)
