"""A recorder that is always on: exact totals of every step, looks when they are due, no false alarm."""

import collections
import copy
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import pytracer
from pytracer import History, errors, trace
from pytracer.basics.units import size_text
from pytracer.cli import main
from pytracer.data import step_totals
from pytracer.data._native import C
from pytracer.data.step_totals import StepFile, StepRow, fold
from pytracer.reading.job import read_job
from pytracer.recording.looks import Looks, Why, name_of
from tests import looks_reference
from tests.looks_reference import DEPARTS, DUE, FIRST, GROWS
from tests.step_files import add


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 8) -> torch.Tensor:
    output = model(torch.ones(rows, 16))
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return output


# ---------------------------------------------------------------- totals


@pytest.mark.parametrize("seed", range(5))
def test_totals_of_each_step_equal_a_full_trace(place: Path, seed: int) -> None:
    draw = random.Random(seed)
    kept: list[torch.Tensor] = []
    with pytracer.always("run.always", devices="cpu"), trace(devices="cpu", table=False) as t:
        model, optimizer = parts()
        for _ in range(12):
            output = step(model, optimizer, rows=draw.randint(1, 500))
            if draw.random() < 0.3:
                kept.append(output)
            if draw.random() < 0.2:
                kept.clear()
    rows = History("run.always").steps()
    full = t.steps()
    assert list(rows["peak"])[:-1] == list(full["peak_bytes"])[: len(rows) - 1]
    assert list(rows["steps"]) == [1] * 12


@pytest.mark.cuda
def test_totals_of_each_step_equal_cudas_own_counters(place: Path) -> None:
    model = nn.Linear(512, 512).cuda()  # is there before
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    with pytracer.always("run.always", devices="cuda"):
        torch.cuda.reset_peak_memory_stats()
        for rows in (10, 1000, 100, 5000, 10):
            model(torch.ones(rows, 512, device="cuda")).square().mean().backward()
            optimizer.step()
            stats = torch.cuda.memory_stats()
            names = ("requested_bytes.all.peak", "requested_bytes.all.current")
            seen.append((*(stats[name] for name in names), stats["reserved_bytes.all.peak"]))
            torch.cuda.reset_peak_memory_stats()
    rows = History("run.always").steps()
    found = list(zip(rows["peak"], rows["now"], rows["reserved_peak"], strict=True))
    assert found == seen


def test_results_stay_bit_equal_and_nothing_stays_hooked(place: Path) -> None:
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, optimizer = parts()
        return [step(model, optimizer) for _ in range(30)]

    plain = train()
    with pytracer.always("run.always"):
        traced = train()
    assert all(torch.equal(one, other) for one, other in zip(plain, traced, strict=True))
    assert not C.status()["cpu_installed"]


def test_a_forked_child_counts_nothing(place: Path) -> None:
    with pytracer.always("run.always"):
        model, optimizer = parts()
        step(model, optimizer)
        child = os.fork()
        if child == 0:
            model[0].bias.grad = torch.ones(32)  # torch's backward hangs in a forked child
            optimizer.step()
            os._exit(0)
        os.waitpid(child, 0)
        step(model, optimizer)
    assert History("run.always").step_count == 2


def test_only_one_recorder_of_a_process_is_always_on(place: Path) -> None:
    with (
        pytracer.always("one.always"),
        pytest.raises(errors.CaptureError, match="another recorder"),
        pytracer.always("two.always"),
    ):
        pass
    assert not Path("two.always").exists()


def test_a_program_that_marks_its_own_steps_is_counted_so(place: Path) -> None:
    model = nn.Linear(16, 16)
    with pytracer.always("run.always") as recorder:
        for _ in range(5):
            model(torch.ones(4, 16))
            recorder.mark_step()
    assert History("run.always").step_count == 5


def test_rows_go_on_where_the_room_in_the_file_ends(place: Path) -> None:
    with pytracer.always("run.always", size="200kB", devices="cpu") as recorder:
        for number in range(3000):
            torch.ones(1 + number % 7)
            recorder.mark_step()
    rows = History("run.always").steps()
    assert int(rows.steps.sum()) == 3000
    whole = rows[rows.steps == 1]
    assert [*whole.peak] == [4 + 4 * (step % 7) for step in whole.index]
    assert 500 < len(whole) < 1100  # more than one room, and older ones are folded


# ---------------------------------------------------------------- the file


def row(number: int, device: int = 0, peak: int = 0) -> StepRow:
    return StepRow(
        step=number,
        unix_ns=number * 10,
        duration_ns=number % 7,
        looked_at=False,
        device=(device, 0),
        now=peak // 2,
        peak=peak,
        reserved_peak=peak * 2,
        largest=peak // 3,
        requests=number % 5,
        failed=number % 2,
    )


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2**40)), min_size=1, max_size=60))
def test_folded_rows_equal_a_plain_reference(drawn: list[tuple[int, int]]) -> None:
    path = Path(f"/tmp/pytracer-fold-{os.getpid()}.totals")
    path.unlink(missing_ok=True)
    file = StepFile(path, {}, 1 << 20)
    add(file, (row(number, device, peak) for number, (device, peak) in enumerate(drawn)))
    file.close()
    folded = fold(step_totals.read(path).rows)
    path.unlink()
    for device in {device for device, _ in drawn}:
        own = [(number, peak) for number, (kind, peak) in enumerate(drawn) if kind == device]
        groups = [own[at : at + 8] for at in range(0, len(own), 8)]
        found = folded[folded["device_type"] == device]
        assert list(found["step"]) == [group[0][0] for group in groups]
        assert list(found["steps"]) == [len(group) for group in groups]
        assert list(found["least_peak"]) == [min(peak for _, peak in group) for group in groups]
        assert list(found["highest_peak"]) == [max(peak for _, peak in group) for group in groups]
        assert list(found["peak"]) == [sorted(p for _, p in g)[len(g) // 2] for g in groups]
        assert list(found["now"]) == [group[-1][1] // 2 for group in groups]
        assert list(found["failed"]) == [sum(n % 2 for n, _ in group) for group in groups]


def test_the_file_stays_small_and_keeps_every_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.totals"
    file = StepFile(path, {"command": "x"}, 100_000)

    def rows() -> Iterator[StepRow]:
        for number in range(50_000):
            yield row(number, peak=number)
            if number % 10_000 == 0:
                assert path.stat().st_size < 200_000

    add(file, rows())
    file.close()
    found = step_totals.read(path)
    assert found.steps == 50_000
    assert int(found.rows["steps"].sum()) == 50_000
    assert int(found.rows["highest_peak"].max()) == 49_999
    assert list(found.rows["step"][-100:]) == list(range(49_900, 50_000))


@pytest.mark.parametrize("damage", ["empty", "no header", "cut", "not json", "garbage"])
def test_a_damaged_file_is_refused_or_read_as_far_as_it_goes(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "steps.totals"
    file = StepFile(path, {}, 100_000)
    add(file, map(row, range(20)))
    file.close()
    whole = path.read_bytes()
    changed = {
        "empty": b"",
        "no header": b"x" * 5000,
        "cut": whole[:-50],
        "not json": whole[:23] + b"[1" + whole[25:],
        "garbage": whole[:4096] + bytes(random.Random(1).randbytes(1000)),
    }
    path.write_bytes(changed[damage])
    if damage in ("cut", "garbage"):
        assert len(step_totals.read(path).rows) <= 19
    else:
        with pytest.raises(errors.UnreadableTrace):
            step_totals.read(path)
    assert main(["summary", str(tmp_path)]) in (0, errors.UnreadableTrace.exit_code)


_FOREVER = """
import sys, torch, pytracer
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with pytracer.always("run.always"):
    print("ready", flush=True)
    for number in range(10**9):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        print(number, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_program_leaves_all_steps_but_the_last(place: Path, seed: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _FOREVER], stdout=subprocess.PIPE, text=True, env=_environment()
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        for _ in range(random.Random(seed).randint(1, 300)):
            last = program.stdout.readline()
        program.send_signal(signal.SIGKILL)
        last = (program.stdout.read().splitlines() or [last])[-1]
    assert History("run.always").step_count >= int(last)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root}


# ---------------------------------------------------------------- looks


def looked_at(totals: Iterator[tuple[int, int]], steps: int) -> dict[int, str]:
    """The first steps of all looks, with their reasons. Each step has a peak and what stays."""
    looks, found, until = Looks(), {}, -1
    reason = Why.NOTHING
    for number in range(steps):
        if until < 0 and looks.wanted != Why.NOTHING:
            reason = looks.wanted
            found[number], until = name_of(reason), number + reason.steps
        peak, now = next(totals)
        looks.saw(number, (0, 0), peak, now)
        if number + 1 == until:
            looks.looked(reason, number)
            until = -1
    return found


def test_looks_become_rare_while_nothing_changes() -> None:
    found = looked_at(itertools.repeat((10**9, 10**8)), 100_000)
    assert found[0] == FIRST
    assert set(found.values()) == {FIRST, DUE}
    assert 20 < len(found) < 40


def test_a_step_that_departs_is_looked_at_at_once() -> None:
    peaks = iter([10**9] * 5000 + [2 * 10**9] + [10**9] * 5000)
    found = looked_at(((peak, 10**8) for peak in peaks), 10_000)
    assert found[5001] == DEPARTS


@pytest.mark.parametrize("each", [1, 10, 60])
def test_growth_is_looked_at_whenever_it_begins(each: int) -> None:
    def totals() -> Iterator[tuple[int, int]]:
        for number in itertools.count():
            now = 10**8 + max(number - 40_000, 0) // each * 65_536
            yield 10**9 + now, now

    found = looked_at(totals(), 50_000)
    grows = [number for number, reason in found.items() if reason == GROWS]
    assert grows
    assert 40_000 < grows[0] < 42_000
    assert len(grows) < 12  # each look waits twice as long


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=200))
def test_bytes_that_come_back_are_no_growth(sizes: list[int]) -> None:
    least = min(sizes)
    cycle = itertools.cycle([*sizes, least])
    assert GROWS not in looked_at(((2**41, next(cycle)) for _ in itertools.count()), 16).values()


_TOTALS = st.tuples(st.integers(0, 1), st.integers(0, 2**33), st.integers(0, 2**33))


@given(st.lists(_TOTALS, max_size=30), st.integers(1, 40), st.integers(0, 2**20))
def test_looks_equal_a_plain_reference(
    drawn: list[tuple[int, int, int]], repeats: int, growth: int
) -> None:
    fast, plain, until = Looks(), looks_reference.Looks(), -1
    steps = itertools.chain.from_iterable(itertools.repeat(drawn, repeats))
    for number, (device, peak, now) in enumerate(steps):
        assert name_of(fast.wanted) == plain.wanted
        if until < 0 and plain.wanted:
            until = number + looks_reference.STEPS[plain.wanted]
        totals = (number, (device, 0), peak + growth * number, now + growth * number)
        assert name_of(fast.saw(*totals)) == plain.saw(*totals)
        if number + 1 == until:
            reason = plain.wanted
            fast.looked(fast.wanted, number)
            plain.looked(reason, number)
            until = -1


# ---------------------------------------------------------------- alarms


def test_an_alarm_names_the_variable_and_the_line(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytracer.recording.always._PATIENCE", 300.0)  # on a busy machine
    alarms: list[str] = []
    history = []
    with pytracer.always("run.always", alarm=alarms.append, share=0.5):
        model, optimizer = parts()
        for number in range(700):
            output = step(model, optimizer, rows=200)
            if number >= 300:
                history.append(output)
    assert len(alarms) == 1
    assert "`history` keeps what each step makes" in alarms[0]
    assert "test_always.py" in alarms[0]
    assert any(look.reason == GROWS and look.step > 300 for look in History("run.always").looks)


def test_a_card_that_is_nearly_full_is_told_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms: list[str] = []
    card = SimpleNamespace(total_memory=1000 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    with pytracer.always("run.always", alarm=alarms.append, devices="cpu") as recorder:
        for number, mib in enumerate((900, 960, 970, 990)):
            recorder._compare_with_the_card(row(number, device=1, peak=mib << 20))
    assert alarms == ["step 1: cuda:0 is at 960 MiB of 0.98 GiB"]


def bounded_queue() -> Callable[[], object]:
    (model, optimizer), kept = parts(), collections.deque[torch.Tensor](maxlen=150)
    return lambda: kept.append(step(model, optimizer).detach())


def average_of_weights() -> Callable[[], object]:
    model, optimizer = parts()
    average = copy.deepcopy(model.state_dict())

    def one() -> None:
        step(model, optimizer)
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.01)

    return one


def carried_state() -> Callable[[], object]:
    cell, state = nn.LSTMCell(16, 16), [torch.zeros(8, 16), torch.zeros(8, 16)]
    optimizer = torch.optim.Adam(cell.parameters())

    def one() -> None:
        hidden = cell(torch.ones(8, 16), (state[0], state[1]))
        hidden[0].sum().backward()
        state[:] = [part.detach() for part in hidden]
        optimizer.step()
        optimizer.zero_grad()

    return one


def other_shapes() -> Callable[[], object]:
    (model, optimizer), draw = parts(), random.Random(3)
    return lambda: step(model, optimizer, rows=draw.randint(1, 2000))


def evaluates_now_and_then() -> Callable[[], object]:
    (model, optimizer), numbers = parts(), itertools.count()

    def one() -> None:
        step(model, optimizer)
        if next(numbers) % 50 == 49:
            with torch.no_grad():
                model(torch.ones(5000, 16))

    return one


def cache_that_fills() -> Callable[[], object]:
    (model, optimizer), cache, draw = parts(), dict[int, torch.Tensor](), random.Random(5)

    def one() -> None:
        rows = draw.randint(1, 60)
        if rows not in cache:
            cache[rows] = torch.ones(rows, 16)
        step(model, optimizer, rows=rows)

    return one


@pytest.mark.parametrize(
    "make",
    [
        bounded_queue,
        average_of_weights,
        carried_state,
        other_shapes,
        evaluates_now_and_then,
        cache_that_fills,
    ],
)
def test_a_healthy_program_gets_no_alarm(
    make: Callable[[], Callable[[], object]], place: Path
) -> None:
    alarms: list[str] = []
    with pytracer.always("run.always", alarm=alarms.append, share=0.5):
        one = make()
        for _ in range(400):
            one()
    assert alarms == []


# ---------------------------------------------------------------- the command line

_TRAIN = """
import sys, torch
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(30):
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
sys.exit(int(sys.argv[1]))
"""


def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**_environment(), **more}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, check=False
    )


def test_run_always_counts_a_program_as_it_is(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(_TRAIN)
    for code, folder in (("0", "train.always"), ("5", "train.1.always")):
        ended = run("-m", "pytracer", "run", "--always", "train.py", code)
        assert ended.returncode == int(code)
        assert History(folder).step_count == 30
    assert "30 steps; look at them:" in ended.stderr
    assert main(["summary", "train.always"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("30 steps of train.py in ")
    assert "pytracer summary train.always/step-0000" in shown
    assert main(["summary", "--json", "train.always"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 30


def test_memory_that_ends_between_looks_gets_its_page(place: Path) -> None:
    Path("train.py").write_text(
        _TRAIN.replace("range(30)", "range(202)").replace("sys.exit", "torch.empty(1 << 60)")
    )
    ended = run("-m", "pytracer", "run", "--always", "train.py", "0")
    assert ended.returncode == 1
    assert "out of memory in step 202, between two looks" in ended.stderr
    assert "DefaultCPUAllocator: can't allocate memory" in ended.stderr
    history = History("train.always")
    look = history.look(history.looks[-1].step)
    said = ended.stderr.split("between two looks")[1]
    assert "inferred  step 202 held the same" in said
    assert size_text(look.peak.by_category["weights"]) in said
    assert history.post_mortem() in ended.stderr


@pytest.mark.parametrize("option", ["--steps=3", "--stacks", "--no-watch", "--stop"])
def test_always_refuses_options_that_contradict_it(place: Path, option: str) -> None:
    Path("train.py").write_text(_TRAIN)
    ended = run("-m", "pytracer", "run", "--always", option, "train.py", "0")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert option.partition("=")[0] in ended.stderr


def test_a_program_without_tensors_leaves_no_folder(place: Path) -> None:
    Path("other.py").write_text("import torch")
    assert run("-m", "pytracer", "run", "--always", "other.py").returncode == 0
    assert not list(place.glob("*.always"))


def test_a_folder_that_is_there_is_not_replaced(place: Path) -> None:
    Path("mine").mkdir()
    Path("train.py").write_text(_TRAIN)
    ended = run("-m", "pytracer", "run", "--always", "-o", "mine", "train.py", "0")
    assert ended.returncode == 0
    assert "mine exists" in ended.stderr
    assert not list(Path("mine").iterdir())


def test_looks_are_ordinary_traces(place: Path) -> None:
    with pytracer.always("run.always", devices="cpu"):
        model, optimizer = parts()
        for _ in range(20):
            step(model, optimizer)
    history = History("run.always")
    look = history.look(history.looks[-1].step)
    assert look.peak.by_category["weights"] > 0
    assert look.peak.by_category["unknown"] == 0
    with pytest.raises(errors.UsageError, match="looks begin with"):
        history.look(10**6)
    with pytest.raises(errors.UsageError, match="or name one of its looks"):
        read_job("run.always")


def test_old_looks_make_room_for_new_ones(place: Path) -> None:
    with pytracer.always("run.always", size="300 KiB", share=0.9):
        model, optimizer = parts()
        for number in range(600):
            step(model, optimizer, rows=8 + 20_000 * (number % 100 == 99) * (number // 100 + 1))
    folder = Path("run.always")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 400 * 1024
    assert History(folder).looks[0].step == 0
