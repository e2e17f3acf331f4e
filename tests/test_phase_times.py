"""How long phases take: the host's clock on the CPU, events in the stream on a GPU."""

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from torch import nn

from pytracer import load, trace
from pytracer.analysis.answers import training_steps
from pytracer.analysis.facts import device_times
from pytracer.capture import phase_times, session
from pytracer.capture.phase_times import PhaseTimes
from pytracer.cost import measurements
from pytracer.data._native import C
from pytracer.data.recorded import Trace
from pytracer.data.schema import PHASE
from tests.test_analysis_categories import programs, random_program
from tests.trace_builder import TraceBuilder, training_step

PHASES = ("forward", "backward", "optimizer")


# ---------------------------------------------------------------- the host's times


@given(programs)
@example(random_program([4, 0, 0, 0, 15, 0, 0, 4]))  # steps end before and after all events
@example(random_program([0, 6, 0, 4, 4]))
def test_the_phases_of_a_step_take_no_longer_than_the_step(program: Trace) -> None:
    for row in training_steps.step_rows(program):
        times = (row.forward_ns, row.backward_ns, row.optimizer_ns)
        assert min(times) >= 0
        assert sum(times) <= row.end_ns - row.start_ns


def test_every_step_on_the_cpu_has_its_phases_times_without_cost() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with trace(model, optimizer) as t:
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    steps = t.steps()
    assert len(steps) == 3
    for phase in PHASES:
        assert (steps[f"{phase}_ns"] > 0).all()
        assert steps[f"device_{phase}_ns"].isna().all()
    assert "a step    forward " in t.table()
    assert "GPU" not in t.table()


# ---------------------------------------------------------------- a device, by hand


class Device:
    """A stopwatch whose device is `behind` events late; each event is 1000 ns after the last."""

    def __init__(self, behind: int = 0) -> None:
        self.behind, self.recorded, self.made, self.capturing = behind, 0, 0, False

    def device_of(self, tensor: torch.Tensor) -> int | None:
        return 0

    def mark(self, device: int, again: Any) -> Any:
        if self.capturing:
            return None
        self.recorded += 1
        self.made += again is None
        event = [0] if again is None else again
        event[0] = self.recorded
        return event

    def has_passed(self, event: Any) -> bool:
        return not self.capturing and event[0] <= self.recorded - self.behind

    def elapsed_ns(self, begin: Any, end: Any) -> int:
        return int(1000 * (end[0] - begin[0]))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Every CPU session believes that this is its GPU, and every tensor that it is there."""
    found = Device()
    monkeypatch.setattr(session, "PhaseTimes", lambda _: PhaseTimes(found))
    return found


def measured(t: trace) -> list[tuple[str, int]]:
    """Phase and microseconds, in order."""
    document = t.data.meta["phase_times"]
    names = {number: name for name, number in PHASE.items()}
    rows = zip(document["phase"], document["device_ns"], strict=True)
    return [(names[phase], taken // 1000) for phase, taken in rows]


MODEL = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
X = torch.ones(2, 4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, micro_steps: int = 1) -> None:
    for _ in range(micro_steps):
        model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(MODEL.parameters(), lr=0.1)


STEP = [("forward", 2), ("backward", 1), ("optimizer", 1)]


def test_a_forward_lasts_until_its_backward_begins(device: Device) -> None:
    """Entered, left, backward begins: two events later."""
    with trace(MODEL, devices="cpu") as t:
        train(MODEL, sgd())
    assert measured(t) == STEP
    assert device.recorded == 6


def test_a_step_has_its_own_times_and_those_of_all_its_micro_steps(device: Device) -> None:
    optimizer = sgd()
    with trace(MODEL, devices="cpu") as t:
        train(MODEL, optimizer)
        train(MODEL, optimizer, micro_steps=3)
    steps = t.steps()
    assert list(steps.device_forward_ns) == [2000, 6000]
    assert list(steps.device_backward_ns) == [1000, 3000]
    assert list(steps.device_optimizer_ns) == [1000, 1000]
    assert device.recorded == 6 + 3 * 4 + 2  # fewer than ten for a micro-step


def test_several_models_before_one_backward_are_one_forward(device: Device) -> None:
    with trace(MODEL, devices="cpu") as t:
        (MODEL(X) + MODEL(X)).sum().backward()
    assert measured(t) == [("forward", 4), ("backward", 1)]


def test_calls_without_a_backward_last_as_long_as_they_do(device: Device) -> None:
    """Without grad mode at once; with it, when an optimizer or the end shows that none follows."""
    with trace(MODEL, devices="cpu") as t:
        with torch.no_grad():
            MODEL(X)
        train(MODEL, sgd())
        MODEL(X)
        MODEL(X)
    assert measured(t) == [("forward", 1), *STEP, ("forward", 1), ("forward", 1)]


def test_a_teacher_inside_a_forward_is_part_of_it(device: Device) -> None:
    """It has no time of its own, which would count twice, unless no backward follows."""
    with trace(MODEL, devices="cpu") as t:
        for trains in (True, False):
            out = MODEL(X)
            with torch.no_grad():
                MODEL(X)
            if trains:
                out.sum().backward()
    assert measured(t) == [("forward", 4), ("backward", 1), ("forward", 1), ("forward", 1)]


def test_a_program_that_trains_is_not_slowed_by_the_times_of_its_evaluations(
    device: Device,
) -> None:
    """Of a hundred calls between two steps the first four are timed, then none, and every forward."""
    optimizer = sgd()
    with trace(MODEL, devices="cpu") as t:
        for calls in (100, 100, 100, 2, 2):
            with torch.no_grad():
                for _ in range(calls):
                    MODEL(X)
            train(MODEL, optimizer)
    begins, later, few = ([("forward", 1)] * calls for calls in (100, 4, 2))
    assert measured(t) == [*begins, *STEP, *later, *STEP, *STEP, *STEP, *few, *STEP]
    assert list(t.steps().device_forward_ns) == [2000] * 5


def test_every_call_of_a_program_that_only_evaluates_is_timed(device: Device) -> None:
    with trace(MODEL, devices="cpu") as t, torch.no_grad():
        for _ in range(100):
            MODEL(X)
    assert measured(t) == [("forward", 1)] * 100


def test_a_closure_that_evaluates_much_still_ends_the_optimizers_time(device: Device) -> None:
    optimizer = sgd()

    def closure() -> torch.Tensor:
        with torch.no_grad():
            for _ in range(10):
                MODEL(X)
        loss = MODEL(X).sum()
        loss.backward()
        return loss

    with trace(MODEL, devices="cpu") as t:
        train(MODEL, optimizer)
        optimizer.step(closure)  # type: ignore[arg-type]
    first = [("optimizer", 1), ("forward", 1)]
    calls = [("forward", 1)] * 4
    assert measured(t) == [*STEP, *first, *calls, ("forward", 2), ("backward", 1), ("optimizer", 1)]


def test_a_look_between_two_models_ends_takes_no_event_that_a_forward_needs() -> None:
    """A teacher without grad ends before the forward that it is part of, and is not read early."""
    device = Device()
    times, student = PhaseTimes(device), nn.Linear(2, 2)

    def step() -> None:
        times.root_entered(student)
        times.root_left()
        with torch.no_grad():
            times.root_entered(student)
            times.root_left()
        times.backward_begins(())
        times.backward_ends()
        times.step_begins()
        times.step_ends()

    device.behind = 100  # nothing has passed
    step()
    events_of_a_step, teacher_ends = device.recorded, 4
    step()
    device.behind = events_of_a_step - teacher_ends + 1
    times.look()  # as when many wait
    step()
    device.behind = 0
    times.finish(wait=True)
    document = times.document()
    assert document is not None
    assert len(document["phase"]) == 9
    assert document["device_ns"] == document["device_ns"][:3] * 3


def test_a_module_that_holds_its_parent_is_looked_at_once() -> None:
    """named_modules() knows what it has seen; whoever walks by himself must as well."""
    device = Device()
    model, head = nn.Sequential(), nn.Sequential()
    model.add_module("head", head)
    head.add_module("model", model)
    times = PhaseTimes(device)
    times.root_entered(model)
    assert device.recorded == 0
    head.add_module("last", nn.Linear(1, 1))
    times.root_entered(model)
    assert device.recorded == 1


def test_an_optimizers_closure_is_not_the_optimizers_time(device: Device) -> None:
    optimizer = sgd()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = MODEL(X).sum()
        loss.backward()
        return loss

    with trace(MODEL, devices="cpu") as t:
        train(MODEL, optimizer)
        optimizer.step(closure)  # type: ignore[arg-type]
    parts = [("optimizer", 1), ("forward", 2), ("backward", 1), ("optimizer", 1)]
    assert measured(t) == [*STEP, *parts]


def test_a_backward_that_fails_has_no_time_and_spoils_none(device: Device) -> None:
    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    with trace(MODEL, devices="cpu") as t:
        loss = MODEL(X).sum()
        loss.register_hook(refuse)
        with pytest.raises(ValueError, match="no"):
            loss.backward()
        train(MODEL, sgd())
    assert measured(t) == [("forward", 2), *STEP]


def test_while_a_graph_is_captured_nothing_is_recorded(device: Device) -> None:
    optimizer = sgd()
    with trace(MODEL, devices="cpu") as t:
        device.capturing = True
        train(MODEL, optimizer)
        device.capturing = False
        train(MODEL, optimizer)
    assert measured(t) == STEP
    assert t.steps().device_forward_ns.isna().tolist() == [True, False]


def test_other_threads_do_not_move_the_borders(device: Device) -> None:
    """As DataParallel calls its replicas."""
    with trace(MODEL, devices="cpu") as t:
        loss = MODEL(X).sum()
        other = threading.Thread(target=lambda: MODEL(X))
        other.start()
        other.join()
        loss.backward()
    assert measured(t) == [("forward", 2), ("backward", 1)]


def test_a_long_trace_uses_its_events_again(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phase_times, "_MOST_PENDING", 6)
    optimizer = sgd()
    device.behind = 3
    with trace(MODEL, devices="cpu") as t:
        for _ in range(40):
            train(MODEL, optimizer)
        device.behind = 0
    assert measured(t) == STEP * 40
    assert device.recorded == 240
    assert device.made < 30


def test_events_are_used_again_though_no_more_times_are_kept(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phase_times, "_MOST_PENDING", 6)
    monkeypatch.setattr(phase_times, "_MOST_KEPT", 9)
    optimizer = sgd()
    with trace(MODEL, devices="cpu") as t:
        for _ in range(40):
            train(MODEL, optimizer)
    assert measured(t)[:9] == STEP * 3
    assert device.recorded == 240
    assert device.made < 30


def test_a_device_that_hangs_does_not_hang_the_end(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phase_times, "_LONGEST_WAIT", 0.05)
    device.behind = 10**9
    with trace(MODEL, devices="cpu") as t:
        train(MODEL, sgd())
    assert measured(t) == []
    assert t.health()["count"]["untimed_phases"] == 3
    assert t.steps().device_forward_ns.isna().all()


def test_an_exception_does_not_wait_for_the_device(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phase_times, "_LONGEST_WAIT", 60)
    device.behind = 10**9

    def interrupted() -> None:
        with trace(MODEL, devices="cpu", table=False):
            train(MODEL, sgd())
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - began < 30


def test_ctrl_c_while_the_end_waits_leaves_nothing_hooked(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.behind = 10**9

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(phase_times.time, "sleep", interrupted)
    call = nn.Module.__call__
    with pytest.raises(KeyboardInterrupt), trace(MODEL, devices="cpu", table=False):
        train(MODEL, sgd())
    assert nn.Module.__call__ is call
    assert not C.status()["recording"]


def test_an_error_of_the_device_ends_the_measuring_and_not_the_program(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: something\nand its advice")

    monkeypatch.setattr(device, "mark", fails)
    with trace(MODEL, devices="cpu") as t:
        train(MODEL, sgd())
    assert t.data.meta["phase_times"]["problem"] == "CUDA error: something"
    assert t.data.meta["callback_errors"] == 0
    assert len(t.steps()) == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_a_file_has_the_same_times(device: Device, streamed: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.pytrace"
    optimizer = sgd()
    with trace(MODEL, devices="cpu", path=path if streamed else None) as t:
        train(MODEL, optimizer)
        train(MODEL, optimizer)
    if not streamed:
        t.save(path)
    again = load(path)
    assert measured(t) == STEP * 2
    assert again.steps().equals(t.steps())
    assert again.steps().device_backward_ns.tolist() == [1000, 1000]


def test_chrome_traces_phases_say_what_the_device_took(device: Device, tmp_path: Path) -> None:
    with trace(MODEL, devices="cpu") as t:
        train(MODEL, sgd())
    t.export_chrome_trace(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    shown = {
        event["name"]: event.get("args", {}).get("device ms")
        for event in events
        if event.get("cat") == "pytracer" and event["ph"] == "X" and event["name"] in PHASES
    }
    assert shown == {"forward": 0.002, "backward": 0.001, "optimizer": 0.001}


def test_looking_while_it_records_shows_what_the_device_has_passed(device: Device) -> None:
    with trace(MODEL, devices="cpu") as t:
        train(MODEL, sgd())
        assert t.steps().device_forward_ns.tolist() == [2000]
        train(MODEL, sgd())
    assert len(t.steps()) == 2


def damaged() -> Iterator[object]:
    good = {"phase": [2], "begin": [0], "end": [9], "device_ns": [5]}
    yield from (3, [], {}, {"phase": [2]})
    for name, value in (
        ("phase", [99]),
        ("begin", [-1]),
        ("end", [2**64]),
        ("device_ns", [-5]),
        ("device_ns", [1.5]),
        ("begin", ["x"]),
        ("begin", 7),
        ("phase", [True]),
    ):
        yield {**good, name: value}


@pytest.mark.parametrize("document", list(damaged()), ids=str)
def test_times_that_cannot_be_are_as_if_not_measured(document: object) -> None:
    b = TraceBuilder()
    training_step(b, b.seed(100), activation=100)
    whole = b.trace()
    broken = replace(whole, meta={**whole.meta, "phase_times": document})
    assert len(device_times.device_times(broken).phase) == 0
    assert training_steps.steps(broken).device_forward_ns.isna().all()


# ---------------------------------------------------------------- on a GPU


def gpu_bound() -> Callable[[], None]:
    """Forward, backward and optimizer, each long enough that launches do not count."""
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(6))).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    return step


@pytest.mark.cuda
@pytest.mark.alone
def test_times_with_and_without_cost_agree_on_a_gpu_bound_step() -> None:
    """To 3 %, in rounds that alternate and after a rest: a chip's power holds its clock down."""
    step = gpu_bound()
    times: dict[tuple[bool, str], list[int]] = {}
    for with_cost in (False, True) * 8:
        time.sleep(0.25)
        with trace(devices="cuda", cost=with_cost) as t:
            for _ in range(8):
                step()
        steps = t.steps().iloc[2:]
        for phase in PHASES:
            times.setdefault((with_cost, phase), []).extend(steps[f"device_{phase}_ns"])
    for phase in PHASES:
        plain, measured_too = (statistics.median(times[way, phase]) for way in (False, True))
        assert measured_too == pytest.approx(plain, rel=0.03), phase


@pytest.mark.cuda
@pytest.mark.alone
def test_times_on_a_gpu_are_those_of_its_kernels() -> None:
    """The kernels that torch.profiler saw take no longer, and nearly as long."""
    step = gpu_bound()
    with trace(devices="cuda", cost=True) as t:
        for _ in range(6):
            step()
    steps = t.steps()
    records = measurements.measured(t.data).records
    for phase in ("forward", "backward", "optimizer"):
        kernels = sum(r.time_ns for r in records if r.phase == phase)
        events = 6 * int(steps[f"device_{phase}_ns"].median())  # the first waits for the profiler
        assert 0.8 * events < kernels < 1.05 * events, phase


@pytest.mark.cuda
@pytest.mark.alone
def test_the_phases_of_all_steps_take_no_longer_than_the_steps_on_the_device() -> None:
    step = gpu_bound()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with trace(devices="cuda") as t:
        marks[0].record()
        for _ in range(6):
            step()
        marks[1].record()
    torch.cuda.synchronize()
    total = sum(int(t.steps()[f"device_{phase}_ns"].sum()) for phase in PHASES)
    whole = marks[0].elapsed_time(marks[1]) * 1e6
    assert 0.9 * whole < total <= whole


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # with and without a trace
def test_a_graph_is_captured_and_replayed_as_without_a_trace() -> None:
    model = nn.Linear(64, 64).cuda()
    x = torch.randn(8, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    results = []
    for context in (nullcontext, lambda: trace(model, table=False)):
        with context():  # type: ignore[attr-defined]
            model.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = model(x).sum()
                out.backward()
            graph.replay()
            model(x).sum().backward()
        torch.cuda.synchronize()
        assert model.weight.grad is not None
        results.append((out.clone(), model.weight.grad.clone()))
    for plain, traced in zip(*results, strict=True):
        assert torch.equal(plain, traced)


@pytest.mark.cuda
def test_borders_follow_the_current_stream_and_allocate_nothing() -> None:
    step = gpu_bound()

    def peak(run: Callable[[], None]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def traced() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with trace(devices="cuda") as t, torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        assert (t.steps()[[f"device_{phase}_ns" for phase in PHASES]] > 0).all(axis=None)

    plain = peak(step)
    assert peak(step) == plain
    with trace(devices="cuda"):
        assert peak(step) == plain
    traced()


@pytest.mark.cuda
@pytest.mark.alone
def test_the_borders_of_a_step_cost_microseconds() -> None:
    """Six events, a look at the stream and the clock: a few times what bare events take."""
    times = PhaseTimes(C.cuda_stopwatch())
    model = nn.Linear(4, 4).cuda()

    def one() -> None:
        times.root_entered(model)
        times.root_left()
        times.backward_begins(())
        times.backward_ends()
        times.step_begins()
        times.step_ends()

    events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    stream = torch.cuda.current_stream()

    def bare() -> None:
        for event in events:
            event.record(stream)

    def taken(what: Callable[[], None], count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            what()
        return (time.perf_counter() - began) / count

    taken(one, 50)
    taken(bare, 50)
    torch.cuda.synchronize()
    rounds = [taken(one, 20) / taken(bare, 20) for _ in range(9)]
    times.finish(wait=True)
    assert statistics.median(rounds) < 4
    document = times.document()
    assert document is not None
    assert len(document["begin"]) > 100
    borders = sorted(zip(document["begin"], document["end"], strict=True))
    assert all(begin <= end for begin, end in borders)
