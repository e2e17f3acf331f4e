"""Traces that are damaged in every way, and what must be true of whatever reads them.

    python -m tests.mutations record FOLDER            the traces to damage
    python -m tests.mutations try FOLDER FIRST COUNT   damages them by so many seeds, and reports

A damaged file is refused in one line, or says that it is not whole, or all its totals are the
undamaged one's. In no case is there a traceback, a hang, or more memory than a few such files take.
Only an edit that repairs every checksum may give other totals: that is another file, not a damaged
one, and everything can be asked of it all the same.
"""

import contextlib
import faulthandler
import gzip
import io
import json
import os
import random
import resource
import struct
import subprocess
import sys
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"

HEADER, CHUNK_HEADER = 16, 36
SYNC = bytes.fromhex("C47E910DF35A0AE8")
META, FLUSHES = 1, 13

HANG_SECONDS = 60
MEMORY = 4 << 30  # of addresses: torch's libraries take most of it

# Numbers at which something may turn over.
EDGES = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x10000, 0x10001, 0x7FFFFFFF, 0x80000000]
EDGES += [0xFFFFFFFF, 2**32, 2**47, 2**48 - 1, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 1]

ABSURD: list[Any] = [
    None,
    0,
    -1,
    1e308,
    float("nan"),
    2**70,
    True,
    "x",
    "\0",
    "\udcff",
    [],
    {},
    [[]],
]
ABSURD += [{"a": None}, [1] * 50, {"begin": 5}, {"begin": {"cpu": None}}, [{"bytes": "x"}]]
ABSURD += [{"begin": {"cuda:0": {"allocated_bytes.current": "x"}}, "end": []}]
ABSURD += [{"columns": ["module"], "rows": [[1e9]]}, {"columns": 5, "rows": [[]]}]
ABSURD += [[{"name": 5, "addresses": ["x"]}], [{"name": "a", "addresses": [2**65]}]]
NO_DOCUMENTS = ["", "[", "[]", "null", "1e999", '"x"', '{"a":' * 5000, "[" * 100_000, '{"a":NaN}']


# ---------------------------------------------------------------- damage


@dataclass(frozen=True)
class Seed:
    """A trace to damage."""

    name: str
    content: bytes

    @property
    def is_snapshot(self) -> bool:
        """A pickle: it has no checksums."""
        return self.name.endswith(".pickle")

    @property
    def has_flushes(self) -> bool:
        """Since version 1.1 a file tells which chunks are its own."""
        return not self.is_snapshot and self.content[10] > 0

    @property
    def chunks(self) -> list[bytes]:
        """Header and payload of each."""
        found, at = [], HEADER
        while self.content[at : at + 8] == SYNC:
            size = struct.unpack_from("<I", self.content, at + 24)[0]
            found.append(self.content[at : at + CHUNK_HEADER + size])
            at += CHUNK_HEADER + size
        return found


@dataclass
class Damaged:
    """A file, and whether its checksums are those of its content."""

    kind: str
    content: bytes
    repaired: bool = False


def damage(seed: Seed, seeds: list[Seed], rng: random.Random) -> Damaged:
    """One way of many."""
    bytewise = [flip, scatter, cut, insert, blank]
    chunkwise = [lie_about_a_length, reorder, move, repeat, drop]
    edits = [edit_header, edit_payload, edit_column, edit_numbers, edit_rows, edit_meta, edit_much]
    if seed.is_snapshot:
        way: Callable[..., Any] = rng.choice(bytewise)
        return Damaged(way.__name__, way(seed.content, rng))
    way = rng.choice([*bytewise, *chunkwise, *edits, splice, absurd_numbers])
    if way in bytewise:
        return Damaged(way.__name__, way(seed.content, rng))
    if way is absurd_numbers:
        return Damaged(way.__name__, absurd_numbers(seed, rng), repaired=True)
    chunks = seed.chunks
    if way is splice:
        others = [chunk for each in seeds if not each.is_snapshot for chunk in each.chunks]
        chunks.insert(rng.randrange(len(chunks) + 1), rng.choice(others))
    else:
        way(chunks, rng)
    forged = way in edits and (not seed.has_flushes or rng.random() < 0.5)
    if forged:
        chunks = with_chain(chunks)
    name = way.__name__ + " and the chain" * forged
    return Damaged(name, seed.content[:HEADER] + b"".join(chunks), repaired=forged)


def flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def scatter(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randrange(2, 40)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def insert(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + rng.randbytes(rng.randrange(1, 300)) + content[at:]


def blank(content: bytes, rng: random.Random) -> bytes:
    at, size = rng.randrange(len(content)), rng.randrange(1, 400)
    return content[:at] + bytes(min(size, len(content) - at)) + content[at + size :]


def lie_about_a_length(chunks: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(chunks))
    changed = bytearray(chunks[at])
    struct.pack_into("<I", changed, rng.choice([12, 24, 28, 32]), rng.choice(EDGES) & 0xFFFFFFFF)
    chunks[at] = bytes(changed)


def reorder(chunks: list[bytes], rng: random.Random) -> None:
    rng.shuffle(chunks)


def move(chunks: list[bytes], rng: random.Random) -> None:
    chunk = chunks.pop(rng.randrange(len(chunks)))
    chunks.insert(rng.randrange(len(chunks) + 1), chunk)


def repeat(chunks: list[bytes], rng: random.Random) -> None:
    chunks.insert(rng.randrange(len(chunks) + 1), rng.choice(chunks))


def drop(chunks: list[bytes], rng: random.Random) -> None:
    for _ in range(rng.randrange(1, 4)):
        chunks.pop(rng.randrange(len(chunks)))


def splice(chunks: list[bytes], rng: random.Random) -> None:
    """A chunk of another recording; see `damage`."""


def edit_header(chunks: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(chunks))
    offset, size = rng.choice([(8, 2), (10, 1), (11, 1), (12, 4), (16, 8), (24, 4)])
    value = rng.choice(EDGES) & ((1 << 8 * size) - 1)
    chunk = chunks[at]
    chunks[at] = sealed(chunk[:offset] + value.to_bytes(size, "little") + chunk[offset + size :])


def edit_payload(chunks: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(chunks))
    changed = bytearray(chunks[at])
    for _ in range(rng.randrange(1, 10)):
        changed[rng.randrange(CHUNK_HEADER, len(changed))] = rng.randrange(256)
    chunks[at] = sealed(bytes(changed))


def edit_column(chunks: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(chunks))
    changed = bytearray(chunks[at])
    before = columns_of(chunks[at])[: rng.randrange(changed[10])]
    column = CHUNK_HEADER + sum(len(each) for *_, each in before)
    where = rng.choice([0, 1, 2, 3, 4, 8])
    if where < 4:
        changed[column + where] = rng.choice([0, 1, 2, 3, 4, 8, 255, rng.randrange(256)])
    else:
        struct.pack_into("<I", changed, column + where, rng.choice(EDGES) & 0xFFFFFFFF)
    chunks[at] = sealed(bytes(changed))


def edit_numbers(chunks: list[bytes], rng: random.Random) -> None:
    """Other numbers in one column, some of which turn over somewhere."""
    at = rng.randrange(len(chunks))
    chunk, columns = chunks[at], columns_of(chunks[at])
    number, width, raw = rng.choice(columns)[:3]
    if width == 0:
        return
    rows = raw // width
    few = rng.choices(EDGES, k=3)
    values = [rng.choice(few) if rng.random() < 0.1 else rng.randrange(9) for _ in range(rows)]
    encoded = b"".join((v & ((1 << 8 * width) - 1)).to_bytes(width, "little") for v in values)
    payload = b""
    for each in columns:
        if each[0] == number:
            payload += struct.pack("<BBBBII", number, width, 0, 0, raw, raw) + encoded
        else:
            payload += each[3]
    chunks[at] = sealed(chunk[:24] + struct.pack("<I", len(payload)) + chunk[28:36] + payload)


def columns_of(chunk: bytes) -> list[tuple[int, int, int, bytes]]:
    """Of each its number, its width, its size when decoded and its bytes, header and all."""
    found, at = [], CHUNK_HEADER
    for _ in range(chunk[10]):
        number, width, _, _, raw, encoded = struct.unpack_from("<BBBBII", chunk, at)
        found.append((number, width, raw, chunk[at : at + 12 + encoded]))
        at += 12 + encoded
    return found


def edit_rows(chunks: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(chunks))
    rows = struct.unpack_from("<I", chunks[at], 12)[0] + rng.choice([-1, 1, 2, 100, -2, 60000])
    chunks[at] = sealed(chunks[at][:12] + struct.pack("<I", max(rows, 0)) + chunks[at][16:])


def edit_meta(chunks: list[bytes], rng: random.Random) -> None:
    """A document with absurd values, or what is no document, in a chunk like any other."""
    text = rng.choice(NO_DOCUMENTS)
    if rng.random() < 0.9:
        document = {key: rng.choice(ABSURD) for key in rng.sample(META_KEYS, rng.randrange(1, 4))}
        text = json.dumps(document)
    place = rng.randrange(len(chunks) + 1)
    chunks.insert(place, meta_chunk(text.encode("utf-8", "surrogatepass")))


META_KEYS = [
    "pytracer",
    "torch",
    "host",
    "pid",
    "rank",
    "world_size",
    "command",
    "directory",
    "torch_folder",
    "options",
    "targets",
    "allocator_settings",
    "counters",
    "ddp_buckets",
    "ddp_hooked",
    "frozen_modules",
    "unstepped",
    "renamed",
    "device_memory",
    "phase_times",
    "cuda_problem",
    "variables",
    "search_cut",
    "frameworks",
    "cells",
    "failed",
    "callback_errors",
    "own_time",
    "cost",
    "first_step",
    "imported",
]


def edit_much(chunks: list[bytes], rng: random.Random) -> None:
    for _ in range(rng.randrange(2, 6)):
        rng.choice([edit_header, edit_payload, edit_rows])(chunks, rng)


def absurd_numbers(seed: Seed, rng: random.Random) -> bytes:
    """A sound file, in columns of which numbers are that no recording has."""
    from pytracer.data.recorded import Trace, load
    from pytracer.data.schema import TABLES

    path = Path(f"absurd-{os.getpid()}")
    path.write_bytes(seed.content)
    columns = load(path).to_columns()
    names = [f"{name}.{column}" for name, (row, _) in TABLES.items() for column in row._fields]
    for name in rng.sample(names, rng.randrange(1, 4)):
        column = columns[name] = columns[name].copy()
        for _ in range(rng.randrange(1, 4) if len(column) else 0):
            value = rng.choice(EDGES) & ((1 << 8 * column.itemsize) - 1)
            column[rng.randrange(len(column))] = column.dtype.type(0) + _signed(value, column.dtype)
    document = json.loads(columns["meta"])
    for key in rng.sample(META_KEYS, rng.randrange(3)):
        document[key] = rng.choice(ABSURD)
    columns["meta"] = json.dumps(document)
    Trace.from_columns(columns).save(path, overwrite=True)
    return path.read_bytes()


def _signed(value: int, dtype: Any) -> Any:
    return dtype.type(
        value - (1 << 8 * dtype.itemsize) if dtype.kind == "i" and value >> 63 else value
    )


def sealed(chunk: bytes) -> bytes:
    """With the checksums that its content has."""
    payload = zlib.crc32(chunk[CHUNK_HEADER:][: struct.unpack_from("<I", chunk, 24)[0]])
    head = chunk[:28] + struct.pack("<I", payload)
    return head + struct.pack("<I", zlib.crc32(head)) + chunk[CHUNK_HEADER:]


def meta_chunk(text: bytes) -> bytes:
    """As the writer makes them, uncompressed."""
    return chunk_of(META, 0, struct.pack("<BBBBII", 1, 0, 0, 0, len(text), len(text)) + text)


def chunk_of(table: int, first_row: int, payload: bytes) -> bytes:
    """One column, one row."""
    head = SYNC + struct.pack("<HBBIQIII", table, 1, 0, 1, first_row, len(payload), 0, 0)
    return sealed(head + payload)


def with_chain(chunks: list[bytes]) -> list[bytes]:
    """The flushes say what is before them, as if it had been written so."""
    chain, flushes, found = 0, 0, []
    for chunk in chunks:
        if struct.unpack_from("<H", chunk, 8)[0] == FLUSHES:
            column = struct.pack("<BBBBIII", 1, 4, 0, 0, 4, 4, chain)
            chunk = chunk_of(FLUSHES, flushes, column)
            flushes += 1
        chain = zlib.crc32(chunk[32:36], chain)
        found.append(chunk)
    return found


# ---------------------------------------------------------------- what must be true


@dataclass
class Report:
    """What a series of damaged files was read as."""

    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # "kind: outcome"
    problems: list[dict[str, Any]] = field(default_factory=list)
    slowest_seconds: float = 0.0
    most_memory: int = 0  # bytes resident, of the process that read them

    def add(self, other: "Report") -> None:
        """Two series are one."""
        self.tried += other.tried
        self.outcomes.update(other.outcomes)
        self.problems += other.problems
        self.slowest_seconds = max(self.slowest_seconds, other.slowest_seconds)
        self.most_memory = max(self.most_memory, other.most_memory)


class Judge:
    """Knows what the undamaged traces say."""

    def __init__(self, seeds: list[Seed], folder: Path) -> None:
        self.path = folder / f"damaged-{os.getpid()}"
        self.truth = {seed.name: totals(self._read(seed.name, seed.content)) for seed in seeds}

    def outcome(self, seed: Seed, damaged: Damaged) -> str:
        """In a word; raises AssertionError where it is not as it must be, or whatever is raised."""
        from pytracer.errors import UnreadableTrace

        try:
            loaded = self._read(seed.name, damaged.content)
        except UnreadableTrace as refused:
            if "\n" in str(refused):
                raise AssertionError("it is refused in several lines") from None
            return "refused"
        ask_everything(loaded)
        run_every_command(self.path)
        if not damaged.repaired:
            exports_are_read_back(loaded, self.path)
        status = loaded.file_report.get("status", "imported")
        if status in ("truncated", "corrupt"):
            assert loaded.file_report["notes"], f"it is {status}, and no note says why"
            assert f"{status}_file" in loaded.health().index, (
                f"health() does not say it is {status}"
            )
            assert loaded.health().meaning[f"{status}_file"] in " ".join(str(loaded).split())
        elif self._must_be_equal(seed, damaged):
            assert totals(loaded) == self.truth[seed.name], "totals are silently wrong"
        return status

    def _must_be_equal(self, seed: Seed, damaged: Damaged) -> bool:
        foreign = damaged.kind == splice.__name__ and not seed.has_flushes
        return not (seed.is_snapshot or damaged.repaired or foreign)

    def _read(self, name: str, content: bytes) -> Any:
        from pytracer.reading.views import read

        self.path = self.path.with_suffix(Path(name).suffix)
        self.path.write_bytes(content)
        return read(self.path)


def totals(loaded: Any) -> list[Any]:
    """What people take from a trace."""
    events = len(loaded.data.events.ticks)
    return [loaded.summary().to_dict(), loaded.steps().to_dict(), events]


def ask_everything(loaded: Any) -> None:
    """Every view; a usage error says in words what a trace cannot tell."""
    from pytracer.data.schema import KEYS
    from pytracer.errors import PytracerError

    questions: list[Callable[[], Any]] = [
        lambda: str(loaded),
        lambda: repr(loaded),
        loaded._repr_html_,
        loaded.health,
        loaded.steps,
        loaded.allocations,
        loaded.findings,
        loaded.ledger,
        loaded.fragmentation,
        loaded.bytes_per_parameter,
        loaded.post_mortem,
        loaded.growth_per_step,
        loaded.cost,
        lambda: loaded.check(peak="1 GiB", growth_per_step=0),
        lambda: loaded.diff(loaded),
        lambda: loaded.diff(steps=(0, 1)),
        *(lambda by=by: loaded.timeline(by) for by in ("category", "phase", "device")),
        *(lambda key=key: loaded.by(key) for key in KEYS),
        lambda: loaded.by(["module", "op"], at="end"),
        lambda: loaded.by("line", at=1_000_000),
    ]
    for question in questions:
        with contextlib.suppress(PytracerError):
            question()


def run_every_command(path: Path) -> None:
    """The command line, as if typed."""
    from pytracer.cli import main

    file, out = str(path), str(path.with_suffix(""))
    commands = [
        ["summary", file],
        ["summary", file, "--json"],
        ["diff", file, "--steps", "0,1"],
        ["ledger", file],
        ["cost", file],
        ["check", file, "--max-peak", "1GiB", "--max-growth", "1GiB"],
        ["export", file, "-f", "-o", f"{out}.json"],
        ["export", file, "-f", "-o", f"{out}.out.pickle"],
        ["export", file, "-f", "-o", f"{out}.html"],
    ]
    for command in commands:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            code = main(command)
        assert code in (0, 1, 2, 3, 4), f"{command[0]} ends with {code}"
        assert "Traceback" not in err.getvalue(), f"{command[0]} shows a traceback"
    json.loads(Path(f"{out}.json").read_text())


def exports_are_read_back(loaded: Any, path: Path) -> None:
    """What is saved is what was loaded, and says as well that it is not whole."""
    from pytracer.reading.views import read

    out = str(path.with_suffix(""))
    read(f"{out}.out.pickle")
    again = read(loaded.save(f"{out}.again", overwrite=True))
    assert again.summary().equals(loaded.summary()), "what is saved is not what was loaded"
    assert again.data.losses == loaded.data.losses, "what was lost is forgotten when it is saved"


# ---------------------------------------------------------------- many of them


def run(folder: Path, first: int, count: int, processes: int = 1) -> Report:
    """Damages traces by these seeds; processes of 100 each, so that none may take the others along."""
    subprocess.run([*_command("record"), str(folder)], cwd=ROOT, env=_environment(), check=True)
    batches = [(seed, min(100, first + count - seed)) for seed in range(first, first + count, 100)]
    whole = Report()
    with ThreadPoolExecutor(processes) as pool:
        for report in pool.map(lambda batch: _run_batch(folder, *batch), batches):
            whole.add(report)
    return whole


def _run_batch(folder: Path, first: int, count: int) -> Report:
    command = [*_command("try"), str(folder), str(first), str(count)]
    ran = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True)
    if ran.returncode != 0:
        where = {"first": first, "count": count, "problem": f"ended with {ran.returncode}"}
        return Report(
            count, problems=[{**where, "details": _without_folders(ran.stderr, folder)[-3000:]}]
        )
    found = json.loads(ran.stdout)
    return Report(**{**found, "outcomes": Counter(found["outcomes"])})


def _command(what: str) -> list[str]:
    return [sys.executable, "-m", "tests.mutations", what]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}


def read_seeds(folder: Path) -> list[Seed]:
    """Those recorded here, and kept ones: of version 1.0, of a GPU, and memory snapshots."""
    recorded = [Seed(path.name, path.read_bytes()) for path in sorted(folder.glob("seed-*"))]
    kept = [DATA / "streamed-1.0.pytrace", DATA / "h200.pytrace"]
    packed = DATA / "snapshot-plain.pickle.gz"
    return [
        *recorded,
        *(Seed(path.name, path.read_bytes()) for path in kept),
        Seed(packed.stem, gzip.decompress(packed.read_bytes())),
    ]


def _try(folder: Path, first: int, count: int) -> Report:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    seeds = read_seeds(folder)
    warnings.simplefilter("error")
    judge, report = Judge(seeds, folder), Report()
    for number in range(first, first + count):
        rng = random.Random(number)
        seed = rng.choice(seeds)
        damaged = damage(seed, seeds, rng)
        began = time.monotonic()
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            outcome = judge.outcome(seed, damaged)
        except Exception as problem:
            outcome = "wrong"
            what = _without_folders(str(problem) or type(problem).__name__, folder)
            where = {"seed": number, "trace": seed.name, "kind": damaged.kind, "problem": what}
            details = _without_folders(traceback.format_exc(), folder)
            report.problems.append({**where, "details": details[-3000:]})
        faulthandler.cancel_dump_traceback_later()
        report.tried += 1
        report.outcomes[f"{damaged.kind}: {outcome}"] += 1
        report.slowest_seconds = max(report.slowest_seconds, time.monotonic() - began)
    report.most_memory = most_resident()
    return report


def most_resident() -> int:
    """The most bytes that this process had resident.

    `ru_maxrss` also counts what its parent had when it was started.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _without_folders(text: str, folder: Path) -> str:
    """What is committed names files of the project and of no machine."""
    return text.replace(f"{ROOT}{os.sep}", "").replace(f"{folder}{os.sep}", "")


def _record(folder: Path) -> None:
    """A streamed trace of several flushes, one with operators and costs of nothing, one without."""
    import torch

    import pytracer

    torch.set_num_threads(1)

    def record(name: str, steps: int, **options: Any) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        optimizer, kept = torch.optim.Adam(model.parameters()), []
        with pytracer.trace(model, optimizer, devices="cpu", table=False, **options) as traced:
            for step in range(steps):
                model(torch.ones(2, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                kept.append(torch.empty(100 + step))
                time.sleep(0.12 if "path" in options else 0)
        return traced

    record("streamed", 6, stacks=True, path=folder / "seed-streamed.pytrace")
    record("saved", 4).save(folder / "seed-saved.pytrace")
    record("category", 5, detail="category").save(folder / "seed-category.pytrace")


def _main(what: str, folder: Path, *numbers: int) -> None:
    if what == "record":
        _record(folder)
    else:
        sys.stdout.write(json.dumps(vars(_try(folder, *numbers))))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]).resolve(), *map(int, sys.argv[3:]))
