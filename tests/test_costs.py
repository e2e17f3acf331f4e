"""What tracing may cost, as far as it can be tested without a quiet machine.

Ratios of times belong to benchmarks/overhead.py. Here are figures that are the same on every run:
instructions that the core spends, counted by valgrind, and bytes that a recording holds. One ratio
of processor times stands guard against a slip of another order of magnitude.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pytracer
from benchmarks import models
from pytracer.data._native import C

ROOT = Path(__file__).parents[1]
CORE = ROOT / "csrc" / "core"

# Runs one thing many times through the recorder, as the hooks do.
DRIVER = r"""
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "device_totals.h"
#include "recorder.h"

using namespace pytracer;

int main(int, char** arguments) {
  std::string_view what = arguments[1];
  long times = std::atol(arguments[2]);
  if (what == "alloc_and_free_between_looks") {
    DeviceTotals::get().begin();
    for (long i = 0; i < times; ++i) {
      auto address = static_cast<uint64_t>(0x1000 + i * 64);
      DeviceTotals::get().count_host_alloc(address, 64);
      DeviceTotals::get().count_host_free(address);
    }
    return 0;
  }
  Recorder& recorder = Recorder::get();
  uint32_t session = recorder.begin_session(Recorder::kNoLimit);
  ThreadState& thread = Recorder::this_thread();
  int outer = 0;
  int inner = 0;
  auto no_nodes = [] { return int64_t{-1}; };
  recorder.push(thread, ScopeKind::kUser, &outer, "outer");
  for (long i = 0; i < times; ++i) {
    auto address = static_cast<uint64_t>(0x1000 + i * 64);
    if (what != "alloc_and_free") {
      recorder.push(thread, ScopeKind::kOp, &inner, "aten::add");
    }
    if (what != "op") {
      recorder.record(Action::kAlloc, kCpuPlace, address, 64);
      recorder.record(Action::kFreeCompleted, kCpuPlace, address, 0);
    }
    if (what != "alloc_and_free") {
      if (!Recorder::pop_untouched(thread, &inner, no_nodes)) {
        recorder.pop(thread, &inner);
      }
    }
  }
  recorder.pop(thread, &outer);
  recorder.end_session(session);
}
"""

_FILES = ("recorder", "scope_stack", "forward_map", "device_totals")

# Instructions each may take: a little more than it does, for other compilers.
LIMITS = {
    "op": 60,  # entered and left, nothing happens inside: most operators
    "alloc_and_free": 390,  # two events
    "op_with_alloc_and_free": 920,  # two events and an operator's begin and end
    "alloc_and_free_between_looks": 150,  # two events while a recorder is always on
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core and the driver, compiled as the extension is."""
    for tool in ("valgrind", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} to count instructions")
    folder = tmp_path_factory.mktemp("driver")
    source, program = folder / "driver.cpp", folder / "driver"
    source.write_text(DRIVER)
    options = ("-std=c++20", "-O3", "-fPIC", "-pthread", f"-I{CORE}")
    recorder = [CORE / f"{name}.cpp" for name in _FILES]
    subprocess.run(["g++", *options, source, *recorder, "-o", program], check=True)
    return program


def instructions(program: Path, what: str, times: int) -> int:
    """How many instructions the program runs in all."""
    result = subprocess.run(
        [
            "valgrind",
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            program,
            what,
            str(times),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"Collected : (\d+)", result.stderr)
    assert found, result.stderr
    return int(found[1])


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize(("what", "limit"), LIMITS.items(), ids=LIMITS)
def test_instructions_in_the_core(driver: Path, what: str, limit: int) -> None:
    few, many = instructions(driver, what, 5_000), instructions(driver, what, 25_000)
    each = (many - few) / 20_000
    assert each <= limit, f"{what}: {each:.0f} instructions"


@pytest.mark.slow
def test_an_event_takes_at_most_64_bytes_of_host_memory() -> None:
    """Of the worst case: a step on the CPU that is mostly small operators."""
    workload = models.tiny()
    workload.step()
    with pytracer.trace(workload.model, workload.optimizer, table=False) as traced:
        for _ in range(60):
            workload.step()
        held = C.status()["host_bytes"]
    data = traced.data
    events, scopes, ends = (
        len(table.ticks) for table in (data.events, data.scopes, data.scope_ends)
    )
    logs = 32 * events + 24 * scopes + 16 * ends
    chunks = (32 + 24 + 16) * (1 << 16)  # the last chunk of each log may be nearly empty
    assert logs <= held <= logs + chunks
    assert logs <= 64 * events
    columns = sum(
        column.nbytes for table in (data.events, data.scopes, data.scope_ends) for column in table
    )
    assert columns <= 64 * events


def processor_time(run: Callable[[], object]) -> float:
    """The least of several, in batches apart: others may slow the machine down for a while."""
    least = float("inf")
    for _ in range(4):
        for _ in range(15):
            before = time.process_time()
            run()
            least = min(least, time.process_time() - before)
        time.sleep(0.2)
    return least


@pytest.mark.slow
def test_tracing_costs_a_fraction_of_a_step() -> None:
    """Many times what it costs, and far below what would be a mistake: see overhead.py."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        workload = models.tiny()
        for _ in range(5):
            workload.step()
        plain = processor_time(workload.step)
        traced = again = float("inf")
        for _ in range(3):  # against the step before any trace: others slow the machine for seconds
            with pytracer.trace(workload.model, workload.optimizer, stacks=True, table=False):
                workload.step()
                traced = min(traced, processor_time(workload.step))
            again = min(again, processor_time(workload.step))
            if traced < 1.6 * plain and again < 1.25 * plain:
                break
    finally:
        torch.set_num_threads(threads)
    assert traced < 1.6 * plain
    assert again < 1.25 * plain  # nothing is left in the way
