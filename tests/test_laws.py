"""The laws that make a trace worth believing, on real programs and against torch's own counters."""

import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pytracer import load, trace
from pytracer.analysis.answers import training_steps
from pytracer.data._native import C, core
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, TABLES

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for benchmarks/models.py


def live_and_peak(data: Trace, device_type: int) -> tuple[int, int]:
    """Requested bytes alive at the end, and the most there ever were, by the events alone."""
    found = core.lifetimes(data.to_columns())
    on_device = data.places.device_type[found["place"]] == device_type
    start, completed = found["start"][on_device], found["completed"][on_device]
    size = found["bytes"][on_device].astype(np.int64)
    changes = np.zeros(len(data.events.ticks) + 1, np.int64)
    np.add.at(changes, start + 1, size)
    ended = completed >= 0
    np.add.at(changes, completed[ended] + 1, -size[ended])
    total = np.cumsum(changes)
    assert found["counters"]["implicit_frees"] == 0
    assert found["counters"]["unmatched_frees"] == 0
    assert found["counters"]["frees_from_before"] == 0
    assert found["counters"]["unmatched_free_requests"] == 0
    return int(total[-1]), int(total.max())


def train(model: nn.Module, make_batch, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        inputs, targets = make_batch()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------------- the CPU allocator


def live_storages() -> dict[int, torch.UntypedStorage]:
    """Every storage that a live tensor has, by address: the slow, independent count."""
    gc.collect()
    # By type: isinstance asks objects for their class, and some warn when asked.
    tensors = [obj for obj in gc.get_objects() if type(obj) in (torch.Tensor, nn.Parameter)]
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage()
        for t in tensors
        if t.device.type == "cpu" and t.layout == torch.strided
    }


def test_what_is_alive_at_the_end_is_what_live_tensors_hold():
    before = live_storages()  # which keeps them, so that no address comes again
    with trace(devices="cpu", table=False) as t:
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
        train(model, lambda: (torch.randn(16, 32), torch.randint(0, 8, (16,))))
        kept = [torch.empty(1000), torch.empty(3, dtype=torch.int8)]
    after = live_storages()
    made = [storage.nbytes() for address, storage in after.items() if address not in before]
    live, _ = live_and_peak(t.data, 0)
    assert kept
    # Optimizer hyper-parameters and such may be tensors without storage of their own: equality
    # is to the byte all the same.
    assert live == sum(made)


def test_the_peak_of_a_program_with_a_known_peak_is_known():
    with trace(devices="cpu", table=False) as t:
        first = torch.empty(1_000_000, dtype=torch.uint8)
        second = torch.empty(500_000, dtype=torch.uint8)
        del first
        third = torch.empty(700_000, dtype=torch.uint8)
        del second, third
    assert live_and_peak(t.data, 0) == (0, 1_500_000)


def test_memory_from_before_the_trace_is_seen_when_it_is_met_and_when_it_goes():
    model = nn.Linear(100, 10)
    with trace(model, devices="cpu", table=False) as t:
        model.weight = None
        gc.collect()
    found = core.lifetimes(t.data.to_columns())
    seeds = found["start"] == -1
    assert sorted(found["bytes"][seeds]) == [40, 4000]
    ended = found["bytes"][seeds & (found["completed"] >= 0)]
    assert list(ended) == [4000]


def test_frees_on_other_threads_are_matched():
    with trace(devices="cpu", table=False) as t:
        made = [torch.empty(1000 + i) for i in range(100)]
        thread = threading.Thread(target=made.clear)
        thread.start()
        thread.join()
    assert live_and_peak(t.data, 0)[0] == 0
    assert len(set(t.data.events.thread)) == 2


def test_threads_allocating_at_once_lose_nothing():
    def work() -> None:
        for i in range(2000):
            torch.empty(64 + i % 7)

    with trace(devices="cpu", table=False) as t:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    allocations = np.count_nonzero(t.data.events.action == ACTION["alloc"])
    assert allocations == 8000
    assert live_and_peak(t.data, 0)[0] == 0


@pytest.mark.parametrize("detail", ["op", "category"])
def test_a_saved_trace_is_loaded_equal(tmp_path, detail):
    with trace(devices="cpu", detail=detail, table=False) as t:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        train(model, lambda: (torch.randn(4, 8), torch.randint(0, 8, (4,))))
    loaded = load(t.save(tmp_path / "run.pytrace"))
    assert loaded.file_report["status"] == "complete"
    for table in TABLES:
        for ours, theirs in zip(getattr(t.data, table), getattr(loaded.data, table), strict=True):
            assert np.array_equal(ours, theirs), table
    assert loaded.data.strings == t.data.strings
    assert loaded.data.meta == t.data.meta
    assert loaded.data.losses == t.data.losses


def test_streaming_to_a_file_records_what_memory_would_have(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def run(**options) -> Trace:
        with trace(devices="cpu", table=False, **options) as t:
            for _ in range(20):
                model(torch.randn(4, 8)).sum().backward()
                model.zero_grad()
        return t.data

    run()  # caches of torch's own are made once
    in_memory = run()
    streamed = run(path=tmp_path / "run.pytrace")
    # How often the graph is read depends on the time that it takes.
    some, others = (t.events.action != ACTION["saved"] for t in (in_memory, streamed))
    assert np.array_equal(in_memory.events.action[some], streamed.events.action[others])
    assert np.array_equal(in_memory.events.bytes[some], streamed.events.bytes[others])
    assert [in_memory.strings[n] for n in in_memory.scopes.name] == [
        streamed.strings[n] for n in streamed.scopes.name
    ]


@pytest.mark.parametrize("steps", [4, 5, 6])
def test_a_schedule_leaves_its_last_window_that_recorded_something(steps):
    model = nn.Linear(4, 4)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
    with trace(devices="cpu", schedule=schedule, table=False) as t:
        for _ in range(steps):
            model(torch.randn(2, 4)).sum().backward()
            t.step()
    assert len(t.steps()) == 2


def test_a_schedule_counts_the_users_steps_from_the_first_on():
    """Though an optimizer has stepped before the user's first word."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    recorded = []
    with trace(devices="cpu", schedule=schedule, table=False) as t:
        for number in range(6):
            model(torch.randn(2, 4)).sum().backward()
            if C.status()["recording"]:
                recorded.append(number)
            optimizer.step()
            t.step()
    assert recorded == [2, 3]
    assert len(t.steps()) == 2


def test_a_trace_inside_another_counts_its_own_steps():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()

    with trace(devices="cpu", table=False) as outer:
        step()
        step()
        with trace(devices="cpu", table=False) as inner:
            step()
        with trace(devices="cpu", table=False) as empty:
            pass
    assert [len(t.steps()) for t in (outer, inner, empty)] == [3, 1, 0]
    assert inner.steps().start_ns[0] >= 0
    assert inner.peak.step == 0


def test_a_trace_that_begins_within_a_forward_has_times_of_its_own(tmp_path):
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with trace(devices="cpu", table=False) as self.inner:
                return super().forward(x)

    model = Model(4, 4)
    with trace(devices="cpu", table=False):
        model(torch.randn(2, 4)).sum().backward()
        model(torch.randn(2, 4))
    own = model.inner.data
    whole = int(own.clock.unix_ns[-1] - own.clock.unix_ns[0])
    assert sum(training_steps._host_times(own, "forward", 1)) <= whole
    model.inner.export_chrome_trace(tmp_path / "inner.json")
    events = json.loads((tmp_path / "inner.json").read_text())["traceEvents"]
    # Not since the machine was started; what was open already began a little earlier.
    assert max(event.get("dur", 0) for event in events) <= 1e6


def test_a_schedule_keeps_its_last_cycle_that_was_not_cut_short():
    model = nn.Linear(4, 4)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
    with trace(devices="cpu", schedule=schedule, table=False) as t:
        for _ in range(7):  # the second one has begun with the seventh
            model(torch.randn(2, 4)).sum().backward()
            t.step()
    assert len(t.steps()) == 2


# ---------------------------------------------------------------------- CUDA's allocator


def holds_on_cuda(data: Trace) -> None:
    """Law 1, to the byte: what is alive, and the peak, as the allocator counts them."""
    counters = data.meta["counters"]["end"]["cuda:0"]
    live, peak = live_and_peak(data, 1)
    assert live == counters["requested_bytes.current"]
    assert peak == counters["requested_bytes.peak"]
    assert sum(data.losses.values()) == 0


def fresh_cuda() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def gpt2() -> Callable[[], None]:
    from benchmarks import models

    return models.gpt2("cuda", batch=2, length=256).step


def resnet50() -> Callable[[], None]:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet50(weights=None).cuda()
    return lambda: train(
        model,
        lambda: (
            torch.randn(8, 3, 224, 224, device="cuda"),
            torch.randint(0, 1000, (8,), device="cuda"),
        ),
    )


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


def lstm() -> Callable[[], None]:
    model = Tagger().cuda()
    return lambda: train(
        model,
        lambda: (
            torch.randn(16, 50, 64, device="cuda"),
            torch.randint(0, 32, (16, 50), device="cuda"),
        ),
    )


@pytest.mark.cuda
@pytest.mark.parametrize("detail", ["op", "category"])
@pytest.mark.parametrize("make", [gpt2, resnet50, lstm])
def test_cuda_bytes_are_the_allocators_own(make, detail):
    step = make()
    fresh_cuda()
    with trace(detail=detail, table=False) as t:
        for _ in range(3):
            step()
    holds_on_cuda(t.data)


@pytest.mark.cuda
def test_cuda_bytes_hold_with_everything_on():
    step = lstm()
    fresh_cuda()
    with trace(stacks=True, saved_tensors="hooks", table=False) as t:
        step()
    holds_on_cuda(t.data)


@pytest.mark.cuda
def test_cuda_bytes_hold_with_threads_and_streams():
    fresh_cuda()

    def work() -> None:
        side = torch.cuda.Stream()
        for i in range(300):
            x = torch.empty(100_000 + i, device="cuda")
            with torch.cuda.stream(side):
                y = x * 2
                x.record_stream(side)
            del x, y

    with trace(table=False) as t:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    holds_on_cuda(t.data)
    assert len(np.unique(t.data.places.stream[t.data.events.place])) > 1


@pytest.mark.cuda
def test_cuda_memory_from_before_is_seeded_at_one_instant():
    stop = threading.Event()

    def churn() -> None:
        held = []
        while not stop.is_set():
            held.append(torch.empty(1 + len(held) % 5000, device="cuda"))
            if len(held) > 50:
                del held[::2]

    fresh_cuda()
    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            with trace(table=False) as t:
                for _ in range(50):
                    torch.empty(1000, device="cuda")
            found = core.lifetimes(t.data.to_columns())
            assert found["counters"]["unmatched_frees"] == 0
            assert found["counters"]["unmatched_free_requests"] == 0
            assert found["counters"]["implicit_frees"] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.cuda
def test_cuda_bytes_hold_across_empty_cache_and_a_failed_allocation():
    fresh_cuda()
    with trace(table=False) as t:
        kept = [torch.empty(1 << 20, device="cuda") for _ in range(4)]
        torch.cuda.empty_cache()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
        del kept[::2]
        torch.cuda.empty_cache()
    holds_on_cuda(t.data)
    oom = t.data.events.action == ACTION["oom"]
    assert np.count_nonzero(oom) >= 1


SUBPROCESS = """
    import json, sys, torch
    sys.path.insert(0, {root!r})
    from tests.test_laws import live_and_peak, lstm
    from pytracer import trace
    with trace(devices="cuda", table=False) as t:   # CUDA is not up yet
        assert not torch.cuda.is_initialized()
        step = lstm()
        step()
        torch.cuda.empty_cache()
        step()
    counters = t.data.meta["counters"]["end"]["cuda:0"]
    print(json.dumps([*live_and_peak(t.data, 1), counters["requested_bytes.current"],
                      counters["requested_bytes.peak"], t.data.meta["cuda_problem"]]))
"""


@pytest.mark.cuda
@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "roundup_power2_divisions:4"])
def test_cuda_bytes_hold_when_cuda_comes_up_inside_the_block(settings):
    program = textwrap.dedent(SUBPROCESS.format(root=str(ROOT)))
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    live, peak, current_counter, peak_counter, problem = json.loads(
        result.stdout.strip().splitlines()[-1]
    )
    assert problem == ""
    assert (live, peak) == (current_counter, peak_counter)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "cudaMallocAsync"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "NO_CUDA_MEMORY_CACHING"),
    ],
)
def test_an_allocator_that_reports_nothing_is_named_and_the_program_runs(environment, word):
    program = textwrap.dedent("""
        import torch
        from pytracer import trace
        with trace(devices="cuda", table=False) as t:
            x = torch.ones(10, device="cuda")
            assert x.sum().item() == 10
        print(t.data.meta["cuda_problem"])
    """)
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert word in result.stdout
