"""The ledger: from tensors to what the device has in use, with a residual that can be wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pytracer import LoadedTrace, errors, load, trace
from pytracer.analysis.allocator import fragmentation, ledger
from pytracer.analysis.allocator.ledger import Ledger, Row
from pytracer.basics import driver
from pytracer.capture import device_memory, hooks
from pytracer.capture.device_memory import DeviceMemory
from pytracer.cli import main
from pytracer.data.recorded import Trace
from pytracer.export.ledger_text import render, render_now, render_probe
from tests.fake_nvml import FakeNvml
from tests.trace_builder import TraceBuilder

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for benchmarks/ledger.py

MIB = 2**20
UUID = "0f1e2d3c-0000-1111-2222-333344445555"
PID = 4242
CONTEXT = "CUDA context, kernels, libraries"


# ---------------------------------------------------------------- a device that we make up


class Machine:
    """A fake NVML and a fake torch.cuda in the place of the real ones."""

    def __init__(self, patch: pytest.MonkeyPatch, nvml: Any, uuids: list[str]) -> None:
        self.held = [0] * len(uuids)
        self.up = False
        self.fraction = 1.0
        patch.setattr(driver, "_opened", (os.getpid(), nvml))
        patch.setattr(torch.cuda, "is_initialized", lambda: self.up)
        patch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        patch.setattr(torch.cuda, "memory_reserved", lambda index: self.held[index])
        patch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(
                uuid=uuids[int(str(device).rpartition(":")[2])], total_memory=1000 * MIB
            ),
        )
        patch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: self.fraction)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * MIB, 500 * MIB))


# ---------------------------------------------------------------- reading it


def test_devices_are_matched_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's device 0 is NVML's device 1 under CUDA_VISIBLE_DEVICES=1."""
    nvml = FakeNvml("GPU-aaa", "GPU-bbb")
    nvml.devices["GPU-aaa"]["used"], nvml.devices["GPU-bbb"]["used"] = 1000 * MIB, 2000 * MIB
    machine = Machine(monkeypatch, nvml, ["bbb"])
    memory = DeviceMemory(cuda=True)
    memory.begin()
    machine.up, machine.held[0] = True, 20 * MIB
    memory.end()
    document = memory.document()
    assert document["devices"] == {"cuda:0": "bbb"}
    first, last = document["readings"]
    assert set(first["gpus"]) == {"aaa", "bbb"}  # which of them will be used is not known yet
    assert set(last["gpus"]) == {"bbb"}
    assert first["gpus"]["bbb"]["used"] == last["gpus"]["bbb"]["used"] == 2600 * MIB
    assert last["gpus"]["bbb"]["used_as_cuda_says"] == 400 * MIB


def test_an_allocator_limit_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, FakeNvml("GPU-aaa"), ["aaa"])
    machine.up, machine.held[0] = True, 20 * MIB
    memory = DeviceMemory(cuda=True)
    memory.end()
    assert memory.document()["allowed"] == {}
    machine.fraction = 0.25
    memory.end()
    assert memory.document()["allowed"] == {"cuda:0": 250 * MIB}


def test_a_mig_instance_is_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml("GPU-aaa", "MIG-ccc")
    nvml.devices["GPU-aaa"]["migs"] = ["MIG-ccc"]
    nvml.devices["MIG-ccc"]["used"] = 70 * MIB
    assert driver.all_uuids(nvml) == ["aaa", "ccc"]
    machine = Machine(monkeypatch, nvml, ["ccc"])
    machine.up, machine.held[0] = True, 20 * MIB
    memory = DeviceMemory(cuda=True)
    memory.begin()
    assert memory.document()["readings"][0]["gpus"]["ccc"]["used"] == 670 * MIB


def test_an_old_driver_has_no_reserve_of_its_own() -> None:
    nvml = FakeNvml("GPU-aaa", v2=False)
    nvml.devices["GPU-aaa"]["used"] = 100 * MIB
    gpu = driver.read_gpus(nvml, ["aaa"])["aaa"]
    assert (gpu["used"], gpu["driver_reserve"]) == (700 * MIB, None)


def test_a_device_that_changes_while_it_is_read_is_read_again() -> None:
    """Its bytes and its processes are two questions: a context may come up between them."""

    class Busy(FakeNvml):
        asked = 0

        def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
            found = super().nvmlDeviceGetComputeRunningProcesses(handle)
            self.asked += 1
            if self.asked == 1:
                self.devices[handle] |= {"used": 500 * MIB, "processes": {7: 500 * MIB}}
            return found

    gpu = driver.read_gpus(Busy("GPU-aaa"), ["aaa"])["aaa"]
    assert gpu["used"] == 1100 * MIB
    assert gpu["processes"] == [{"pid": 7, "bytes": 500 * MIB}]


def test_a_process_in_two_lists_counts_once_and_only_its_name_is_kept() -> None:
    nvml = FakeNvml("GPU-aaa")
    nvml.devices["GPU-aaa"]["processes"] = {7: 50 * MIB, 8: None}
    gpus = driver.read_gpus(nvml, ["aaa"])
    driver.name_processes(nvml, gpus)
    assert gpus["aaa"]["processes"] == [
        {"pid": 7, "bytes": 50 * MIB, "name": "python3"},
        {"pid": 8, "bytes": None, "name": "python3"},
    ]


def test_what_nvml_hides_is_null() -> None:
    nvml = FakeNvml("GPU-aaa")
    nvml.hidden = True
    assert driver.read_gpus(nvml, ["aaa"])["aaa"]["processes"] is None
    assert driver.read_gpus(nvml, ["zzz"]) == {"zzz": {}}


def test_steps_are_read_at_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, FakeNvml("GPU-aaa"), ["aaa"])
    memory = DeviceMemory(cuda=True)
    memory.begin()
    for _ in range(127):
        memory.stepped()
    memory.end()  # a look in between
    memory.stepped()
    memory.end()
    readings = memory.document()["readings"]
    assert [r["steps"] for r in readings if r["when"] == "step"] == [2**n for n in range(8)]
    assert [r["when"] for r in readings].count("end") == 1


def test_a_program_without_steps_is_read_between_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, FakeNvml("GPU-aaa"), ["aaa"])
    memory = DeviceMemory(cuda=True)
    memory.begin()
    for _ in range(9):
        memory.called()
    memory.stepped()
    for _ in range(9):
        memory.called()
    readings = memory.document()["readings"]
    assert [r["when"] for r in readings] == ["begin", "call", "call", "call", "step"]


def test_a_session_hears_calls_and_steps_and_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    for name in ("called", "stepped"):
        monkeypatch.setattr(DeviceMemory, name, lambda *_, name=name: heard.append(name))
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    with trace(devices="cpu") as t:
        step()
        t.step()
    assert heard == ["called", "stepped", "stepped"]
    step()
    assert len(heard) == 3
    assert hooks.HOOKS.sessions() == []


@pytest.mark.parametrize("broken", ["NVML: Driver/library version mismatch", None])
def test_a_driver_that_fails_is_written_down_and_disturbs_nothing(
    monkeypatch: pytest.MonkeyPatch, broken: str | None
) -> None:
    machine = Machine(monkeypatch, broken or FakeNvml("GPU-aaa"), ["aaa"])
    machine.up, machine.held[0] = True, 20 * MIB
    if broken is None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: 1 / 0)
    memory = DeviceMemory(cuda=True)
    memory.begin()
    memory.end()
    assert memory.document()["problem"] == (broken or "ZeroDivisionError: division by zero")
    json.dumps(memory.document())


def test_reading_a_cpu_trace_leaves_nvml_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "open_nvml", lambda: 1 / 0)
    with trace(devices="cpu") as t:
        torch.ones(10)
    document = t.data.meta["device_memory"]
    assert [reading["when"] for reading in document["readings"]] == ["begin", "end"]
    assert "gpus" not in document["readings"][0]


def test_without_a_driver_nvml_says_why_not() -> None:
    pynvml = pytest.importorskip("pynvml")
    found = driver._open_nvml()
    if isinstance(found, str):
        assert found == "there is no NVIDIA driver here" or found.startswith("NVML: ")
    else:
        assert found is pynvml


def test_without_a_driver_nobody_is_sent_to_install_its_python_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    assert driver._open_nvml() == "there is no NVIDIA driver here"
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: object())
    assert "pip install nvidia-ml-py" in driver._open_nvml()


# ---------------------------------------------------------------- adding it up


def gpu(
    used: int, own: int | None = None, others: dict[int, int | None] | None = None, **more: Any
) -> dict[str, Any]:
    """A device at one reading, in MiB; 600 MiB are the driver's."""
    figures = dict(others or {})
    if own is not None:
        figures[PID] = own
    return {
        "total": 140_000 * MIB,
        "used": used * MIB,
        "driver_reserve": 600 * MIB,
        "processes": [
            {"pid": pid, "bytes": None if size is None else size * MIB, "name": "python3"}
            for pid, size in figures.items()
        ],
        **more,
    }


def reading(when: str, torch_mib: int | None, device: dict[str, Any]) -> dict[str, Any]:
    up = torch_mib is not None
    return {
        "when": when,
        "cuda_initialized": up,
        "reserved": {"cuda:0": (torch_mib or 0) * MIB} if up else {},
        "gpus": {UUID: device},
    }


def traced(
    *readings: dict[str, Any],
    problem: str = "",
    communicators: dict[str, int] | None = None,
    **more: Any,
) -> Trace:
    """40 MiB held by torch's allocator, of which 30 MiB less 100 bytes are tensors."""
    b = TraceBuilder()
    b.snapshot(device="cuda:0")
    base = 1 << 40
    for number in range(2):
        place = b._block(20 * MIB, base + number * 32 * MIB, device="cuda:0")
        b._event("segment_alloc", place, 20 * MIB)
    weight = b.alloc(20 * MIB - 100, address=base, device="cuda:0")
    b.label(weight, "weights", "parameter", "w")
    scratch = b.alloc(2 * MIB, address=base + 48 * MIB, device="cuda:0")
    b.alloc(10 * MIB, address=base + 32 * MIB, device="cuda:0")
    b.free(scratch, requested=True)
    b.meta["counters"] = {"end": {"cuda:0": {"allocated_bytes.current": 30 * MIB}}}
    known = (communicators or {}).items()
    b.meta["communication"] = {"memory": [{"group": name, "bytes": size} for name, size in known]}
    b.meta["device_memory"] = {
        "pid": PID,
        "problem": problem,
        "devices": {"cuda:0": UUID},
        "readings": list(readings),
    }
    b.meta.update(more)
    return b.trace()


def assert_adds_up(found: Ledger) -> None:
    """Every row is the sum of the rows below it, one level deeper, where all of them are known."""
    for i, row in enumerate(found.rows):
        below = []
        for later in found.rows[i + 1 :]:
            if later.level <= row.level:
                break
            if later.level == row.level + 1:
                below.append(later)
        if below and row.bytes is not None:
            assert row.bytes == sum(part.bytes or 0 for part in below), row


# Before CUDA: 5 MiB held by nobody, another process with 100. A context of 500 comes.
BEFORE = reading("begin", None, gpu(705, others={7: 100}))
AFTER_A_STEP = reading("step", 40, gpu(1245, own=535, others={7: 100}))


def test_every_row_is_measured_and_the_residual_is_what_is_left() -> None:
    """705 before, 1245 after a step with torch's 40: 500 are the context's. 3 MiB came later."""
    end = reading("end", 40, gpu(1268, own=538, others={7: 120}))
    found = ledger.ledger(traced(BEFORE, AFTER_A_STEP, end))
    assert_adds_up(found)
    level_1 = {row.name: row.bytes for row in found.rows if row.level == 1}
    assert level_1 == {
        "torch's allocator": 40 * MIB,
        CONTEXT: 500 * MIB,
        "other processes": 120 * MIB,
        "driver's reserve": 600 * MIB,
        "in no process's figure": 5 * MIB,
        "residual": 3 * MIB,
    }
    assert found.total == 1268 * MIB
    assert found.residual == 3 * MIB
    assert found.limit == int(1268 * MIB * 0.005)
    assert found.closes is True


def test_the_allocators_part_goes_down_to_the_tensors() -> None:
    end = reading("end", 40, gpu(1245, own=535, others={7: 100}))
    found = ledger.ledger(traced(BEFORE, AFTER_A_STEP, end))
    assert found["allocated"] == 30 * MIB
    assert found["weights"] == 20 * MIB - 100
    assert found["unknown"] == 0
    assert found["rounding"] == 100
    assert found["cached, usable"] == 0
    assert found["cached, fragmented"] == 10 * MIB  # 20 MiB - 100 were the largest request
    assert found.residual == 0


def test_the_residual_can_be_wrong_in_both_directions() -> None:
    """What comes unseen after the last reading is not put into any other row."""
    trace_ = traced(BEFORE, AFTER_A_STEP, reading("end", 40, gpu(1345, own=535, others={7: 100})))
    found = ledger.ledger(trace_)
    assert (found.residual, found.closes) == (100 * MIB, False)
    assert found[CONTEXT] == 500 * MIB
    gone = traced(BEFORE, AFTER_A_STEP, reading("end", 40, gpu(1145, own=435, others={7: 100})))
    assert ledger.ledger(gone).residual == -100 * MIB
    assert_adds_up(ledger.ledger(gone))


def test_whose_the_residual_is_is_said_where_another_counter_tells() -> None:
    end = reading("end", 40, gpu(1345, own=635, others={7: 100}))
    found = ledger.ledger(traced(BEFORE, AFTER_A_STEP, end))
    assert found.residual == 100 * MIB
    assert any("this process took 104,857,600 bytes outside" in note for note in found.notes)


def test_where_cuda_was_up_before_the_processes_own_figure_is_taken() -> None:
    """Begin: 495 beyond torch in our figure, 5 in nobody's; a step later 20 more are loaded."""
    begin = reading("begin", 40, gpu(1240, own=535, others={7: 100}))
    step = reading("step", 40, gpu(1260, own=555, others={7: 100}))
    end = reading("end", 40, gpu(1261, own=555, others={7: 100}))
    found = ledger.ledger(traced(begin, step, end))
    assert_adds_up(found)
    assert found[CONTEXT] == 515 * MIB
    assert found["when the trace began"] == 495 * MIB
    assert found["since: kernels loaded, NCCL, ..."] == 20 * MIB
    assert found["in no process's figure"] == 5 * MIB
    assert found.residual == 1 * MIB


def test_communicators_that_tell_their_memory_have_a_row_of_their_own() -> None:
    end = reading("end", 40, gpu(1268, own=538, others={7: 120}))
    held = {"default_pg": 200 * MIB, "mesh_shard": 30 * MIB}
    without = ledger.ledger(traced(BEFORE, AFTER_A_STEP, end))
    found = ledger.ledger(traced(BEFORE, AFTER_A_STEP, end, communicators=held))
    assert_adds_up(found)
    assert found["NCCL's communicators"] == 230 * MIB
    assert found["mesh_shard"] == 30 * MIB
    assert found[CONTEXT] == without[CONTEXT] - 230 * MIB
    assert found.residual == without.residual


def test_without_a_reading_in_between_the_processes_own_figure_closes_it() -> None:
    end = reading("end", 40, gpu(1245, own=535, others={7: 100}))
    found = ledger.ledger(traced(BEFORE, end))
    assert found[CONTEXT] == 495 * MIB
    assert found.residual == 5 * MIB  # the context's part that is in no process's figure


def test_another_opinion_of_cudas_is_said() -> None:
    end = reading("end", 40, gpu(1245, own=535, used_as_cuda_says=645 * MIB))
    assert not any("cudaMemGetInfo" in note for note in ledger.ledger(traced(BEFORE, end)).notes)
    end["gpus"][UUID]["used_as_cuda_says"] = 600 * MIB
    notes = ledger.ledger(traced(BEFORE, end)).notes
    assert any("(cudaMemGetInfo) says 47,185,920 bytes less" in note for note in notes)


def test_hidden_processes_are_said_to_be_hidden() -> None:
    """In a container our id is not in NVML's list: nobody's figure can be used, ours least."""
    before = reading("begin", None, gpu(705, others={900: 100}))
    step = reading("step", 40, gpu(1245, others={900: 100, 901: 535}))
    end = reading("end", 40, gpu(1246, others={900: 100, 901: 535}))
    found = ledger.ledger(traced(before, step, end))
    assert_adds_up(found)
    assert found["other processes"] is None
    assert found[CONTEXT] == 500 * MIB
    assert found["in no process's figure"] == 105 * MIB
    assert found.residual == 1 * MIB
    assert any("NVML hides this process" in note for note in found.notes)


def test_hidden_processes_and_cuda_up_before_is_one_row_and_says_so() -> None:
    begin = reading("begin", 40, {**gpu(1245), "processes": None})
    end = reading("end", 40, {**gpu(1250), "processes": None})
    found = ledger.ledger(traced(begin, end))
    assert found[CONTEXT] == 605 * MIB
    assert found.residual == 5 * MIB
    assert any("including that of hidden processes" in note for note in found.notes)


def test_without_nvml_the_device_is_as_cuda_says() -> None:
    end = reading("end", 40, {"used_as_cuda_says": 645 * MIB})
    found = ledger.ledger(traced(end, problem="nvidia-ml-py is not installed: pip install it"))
    assert_adds_up(found)
    assert found.rows[0].known_by == "cuda"
    assert found[CONTEXT] is None
    assert found.residual == 605 * MIB  # not made up: it is shown as not explained
    assert any("nvidia-ml-py is not installed" in note for note in found.notes)
    assert "not known" in render(found)


def test_a_process_that_nvml_gives_no_figure_for_is_named() -> None:
    end = reading("end", 40, gpu(1245, own=535, others={7: None}))
    found = ledger.ledger(traced(BEFORE, AFTER_A_STEP, end))
    assert found["process 7 python3"] is None
    assert any("no figure for these processes: 7" in note for note in found.notes)


def test_at_the_peak_there_is_a_sum_and_no_residual() -> None:
    end = reading("end", 40, gpu(1245, own=535, others={7: 100}))
    found = ledger.ledger(traced(BEFORE, AFTER_A_STEP, end), "peak")
    assert_adds_up(found)
    assert (found.residual, found.limit, found.closes) == (None, None, None)
    assert found["allocated"] == 32 * MIB
    assert found.total == 1245 * MIB
    assert any("Nobody reads the device at the peak" in note for note in found.notes)


def test_a_trace_without_readings_has_torchs_part_alone() -> None:
    found = ledger.ledger(traced())
    assert_adds_up(found)
    assert found.total == 40 * MIB
    assert found.residual is None
    assert any("no reading of the device from its end" in note for note in found.notes)


def test_an_imagined_run_had_no_device_to_read() -> None:
    found = ledger.ledger(traced(imagined={"card": "H100"}))
    assert_adds_up(found)
    assert found.residual is None
    assert [note for note in found.notes if "no device to read" in note] == list(found.notes[-1:])
    assert not any("killed" in note for note in found.notes)


def test_an_unknown_moment_or_device_is_refused() -> None:
    with pytest.raises(errors.UsageError, match='"peak" or of the "end"'):
        ledger.ledger(traced(), "middle")  # type: ignore[arg-type]
    with pytest.raises(errors.UsageError, match="nothing was recorded on 'cuda:3'"):
        ledger.ledger(traced(), device="cuda:3")


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=3) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["readings", "gpus", UUID, "used", "processes", "pid", "when", "host"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(anything)
def test_whatever_a_file_says_there_is_a_ledger(document: Any) -> None:
    b = TraceBuilder()
    b.alloc(100)
    b.snapshot(device="cuda:0")
    b.alloc(100, device="cuda:0")
    readings = {"devices": {"cuda:0": UUID}, "readings": [document, document]}
    gpu = {"when": "end", "gpus": {UUID: {"used": 10, "processes": [{"pid": 1, "bytes": 2}]}}}
    of_whom = {"devices": {"cuda:0": UUID}, "readings": [gpu, gpu], "pid": document}
    for value in (document, readings, of_whom):
        b.meta["device_memory"] = value
        for device in ("cpu", "cuda:0"):
            assert_adds_up(ledger.ledger(b.trace(), "end", device))


# ---------------------------------------------------------------- the CPU


def test_resident_memory_is_tensors_heap_files_and_a_residual() -> None:
    b = TraceBuilder()
    b.seed(10 * MIB)
    b.alloc(30 * MIB)
    host = {"resident": 300, "anonymous": 200, "file": 100, "shared": 0}
    later = {"resident": 335, "anonymous": 232, "file": 103, "shared": 0}
    b.meta["device_memory"] = {
        "readings": [
            {"when": when, "host": {name: size * MIB for name, size in figures.items()}}
            for when, figures in (("begin", host), ("end", later))
        ]
    }
    found = ledger.ledger(b.trace())
    assert_adds_up(found)
    assert found["tensors of torch's CPU allocator"] == 40 * MIB
    assert found["the program's own heap"] == 190 * MIB  # 200 less the 10 that were tensors
    assert found["programs and libraries, mapped files"] == 103 * MIB
    assert found.residual == 2 * MIB


def test_the_process_that_is_traced_closes_its_books() -> None:
    """64 MiB that are written are resident, and the residual is small beside them.

    In a process of its own: here, what earlier tests freed may be resident still, and used again.
    """
    program = """
import torch
from pytracer import trace
with trace(devices="cpu") as t:
    kept = torch.ones(16 << 20)
table = t.ledger()
print(int(table.bytes[1]) - kept.nbytes, table.attrs["residual"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    apart, residual = map(int, done.stdout.split())
    assert apart == 0
    assert abs(residual) < 16 * MIB


def test_memory_that_was_never_written_makes_the_residual_negative() -> None:
    with trace(devices="cpu") as t:
        kept = torch.empty(64 * MIB, dtype=torch.float32)
    assert t.ledger().attrs["residual"] < -200 * MIB
    assert any("never written" in note for note in t.ledger().attrs["notes"])
    assert kept.nbytes == 256 * MIB


# ---------------------------------------------------------------- text and command line


def test_the_text_has_every_row_the_residual_and_the_cache() -> None:
    end = reading("end", 40, gpu(1268, own=538, others={7: 120}))
    recorded = traced(BEFORE, AFTER_A_STEP, end)
    found = ledger.ledger(recorded)
    text = render(found, fragmentation.layout(recorded, "end"))
    for row in found.rows:
        assert row.name in text
    assert "nvidia-smi shows 668 MiB: it leaves the driver's reserve out" in text
    assert "residual  3.00 MiB unexplained (tolerance 6.34 MiB)" in text
    assert "could use 0 B of 10.0 MiB; its largest gap is 10.0 MiB." in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_a_saved_trace_has_the_same_ledger(tmp_path: Path, capsys: Any) -> None:
    with trace(devices="cpu") as t:
        kept = torch.ones(MIB)
    path = t.save(tmp_path / "run.pytrace")
    assert load(path).ledger().equals(t.ledger())
    assert main(["ledger", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = [Row(**row) for row in document["rows"]]
    assert tuple(rows) == ledger.ledger(t.data).rows
    assert main(["ledger", str(path), "--at", "peak"]) == 0
    assert "the process's memory is not read at the peak, so there is no residual" in " ".join(
        capsys.readouterr().out.split()
    )
    assert kept.nbytes == 4 * MIB


def test_of_a_memory_snapshot_it_says_that_a_snapshot_does_not_tell(tmp_path: Path) -> None:
    """Torch's file has no reading of the process, which is no fault of this machine."""
    b = TraceBuilder()
    b.alloc(100)
    snapshot = load(LoadedTrace(b.trace()).export_memory_snapshot(tmp_path / "train.pickle"))
    (note,) = ledger.ledger(snapshot.data).notes
    assert note == "A memory snapshot does not contain the process's memory."
    (note,) = ledger.ledger(b.trace()).notes
    assert "/proc" in note


def test_a_file_that_is_written_while_recording_has_it_too(tmp_path: Path) -> None:
    with trace(devices="cpu", path=tmp_path / "run.pytrace"):
        torch.ones(100)
    assert load(tmp_path / "run.pytrace").ledger().attrs["residual"] is not None


def test_a_look_while_recording_has_a_ledger() -> None:
    with trace(devices="cpu") as t:
        kept = torch.ones(MIB)
        assert t.ledger().attrs["residual"] is not None
    assert kept.nbytes


def test_the_ledger_of_a_bad_file_is_one_line(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "bad.pytrace").write_bytes(b"no trace")
    assert main(["ledger", str(tmp_path / "bad.pytrace")]) == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_without_a_file_the_devices_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    nvml = FakeNvml("GPU-aaa")
    nvml.devices["GPU-aaa"] |= {"used": 60 * MIB, "processes": {7: 50 * MIB}}
    monkeypatch.setattr(driver, "_opened", (os.getpid(), nvml))
    assert main(["ledger"]) == 0
    shown = capsys.readouterr().out
    assert "aaa: 660 MiB of 137 GiB in use" in shown
    assert "process 7 python3" in shown
    assert "10.0 MiB" in shown  # in no process
    assert main(["ledger", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"]["aaa"]["used"] == 660 * MIB


def test_without_a_driver_the_newest_trace_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(driver, "_opened", (os.getpid(), "NVML: no driver"))
    monkeypatch.chdir(tmp_path)
    assert main(["ledger"]) == 1
    assert capsys.readouterr().err == (
        "pytracer: the devices cannot be read: NVML: no driver. And there is no .pytrace file here; "
        "record one:  pytracer run train.py\n"
    )
    with trace(devices="cpu", path="run.pytrace", table=False):
        torch.ones(100)
    assert main(["ledger"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Ledger of cpu at the end\n")
    assert shown.err == (
        "pytracer: run.pytrace is the newest trace here\n"
        "pytracer: it is shown because the devices cannot be read: NVML: no driver\n"
    )


def test_what_was_probed_and_what_is_hidden_is_shown() -> None:
    stages = [{"up_to": "context", "device_bytes": 500 * MIB, "process_bytes": None}]
    text = render_probe({"device": "A GPU", "module_loading": "LAZY", "stages": stages})
    assert "CUDA_MODULE_LOADING: LAZY" in text
    assert "with a bare context" in text
    assert "500 MiB" in text
    assert render_now({}) == "NVML shows no device"
    hidden = {"used": 1, "total": 2, "driver_reserve": None, "processes": None}
    assert "does not list the processes" in render_now({"aaa": hidden, "bbb": {}})


# ---------------------------------------------------------------- the device


@pytest.mark.cuda
@pytest.mark.alone
@pytest.mark.parametrize("condition", ["lazy", "eager", "other process", "limit", "warm"])
@pytest.mark.parametrize("workload", ["mlp", "convnet"])
def test_the_ledger_closes_on_the_device(workload: str, condition: str) -> None:
    """Each in a process of its own; benchmarks/ledger.py does the same with ten workloads."""
    from benchmarks import ledger as proof

    nvml = driver.open_nvml()
    if isinstance(nvml, str):
        pytest.skip(nvml)
    with proof.other_process(condition == "other process"):
        proof.wait_until_quiet(nvml)
        run = proof.in_process(workload, condition)
    assert proof.passed({**run, "condition": condition}), run


@pytest.mark.cuda
def test_reading_a_device_allocates_nothing_and_takes_milliseconds() -> None:
    torch.ones(1, device="cuda")
    if isinstance(driver.open_nvml(), str):
        pytest.skip("NVML cannot be read here")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    memory = DeviceMemory(cuda=True)
    for _ in range(5):
        memory.begin()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert memory.document()["problem"] == ""
    assert min(r["took_ns"] for r in memory.document()["readings"]) < 20_000_000


@pytest.mark.cuda
@pytest.mark.alone
def test_a_process_of_its_own_tells_what_a_context_costs() -> None:
    from pytracer.capture import probe

    if isinstance(driver.open_nvml(), str):
        pytest.skip("NVML cannot be read here")
    stages = [stage["device_bytes"] for stage in probe.measure()["stages"]]
    assert 50 * MIB < stages[0] < 4096 * MIB
    assert stages == sorted(stages)
