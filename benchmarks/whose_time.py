"""Measures whose code a traced step spends its time in: samples of the program's threads.

    python benchmarks/whose_time.py                  # the cases of overhead.py that run here
    python benchmarks/whose_time.py --cases gpt2-host-bound bert-large --seconds 15 --out DIR

A ratio of two times tells little where steps of the same program differ by tens of per cent, as on
shared hosts of GPUs. A share of samples does not depend on how fast the host is at the moment. The
kernel's clock of each thread takes a sample every 100 us of computing (Linux's perf_event_open,
which needs no rights for the process's own code). The sample is the address of the instruction.

Plain steps and those of each mode come in turns. Every mode's figures are milliseconds per step, by
owner: the binary that the code is in. A step touches what the next function would have had to fetch
anyway, so that time is not all added: `compute_dependencies` of torch's engine gets shorter after we
have looked at the graph. What is added in torch is the difference of two rows, and as noisy as they.
"""

import argparse
import bisect
import ctypes
import gc
import mmap
import os
import platform
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # from a checkout, wherever it is run

from benchmarks import kept, slug  # noqa: E402
from benchmarks.overhead import CASES, MODES, PLAIN, Case, can_run, machine, synchronize  # noqa: E402

OURS = "pytracer"
# By parts of a binary's name. The first that fits counts; "others" has the rest.
OWNERS = {
    OURS: ("_C-torch", "_cuda-torch", "_core."),
    "torch": ("libtorch", "libc10"),
    "Python": ("python",),
    "CUDA": ("libcu", "libnv"),
    "C library": ("libc.so", "ld-linux", "libstdc++", "libgcc", "libm.so", "[vdso]"),
}
OTHERS = "others"
PERIOD_US = 100
WARM_UP = 6  # steps: nothing is new after the fifth call of a model
FUNCTIONS = 12  # the most in the results
PAGES = 512  # of a ring of samples: 20 seconds of computing
MODES_SAMPLED = ("category", "default")

# Of linux/perf_event.h.
_SOFTWARE, _TASK_CLOCK, _SAMPLE_IP, _RECORD_SAMPLE = 1, 1, 1, 9
_DISABLED, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 0, 1 << 5, 1 << 6
_ENABLE, _DISABLE = 0x2400, 0x2401
_OPEN = {"x86_64": 298, "aarch64": 241}
_HEAD, _TAIL = 1024, 1032  # in the first page
_ATTRIBUTES = 128  # bytes of struct perf_event_attr


class Samples:
    """The addresses at which a thread of this process was found."""

    def __init__(self, thread: int) -> None:
        """Opens the thread's clock, which stands still until `count`."""
        attributes = bytearray(_ATTRIBUTES)
        struct.pack_into("=IIQQQ", attributes, 0, _SOFTWARE, len(attributes), _TASK_CLOCK, 0, 0)
        struct.pack_into("=QQ", attributes, 16, PERIOD_US * 1000, _SAMPLE_IP)
        flags = _DISABLED | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
        struct.pack_into("=Q", attributes, 40, flags)
        libc = ctypes.CDLL(None, use_errno=True)
        given = (ctypes.c_char * len(attributes)).from_buffer(attributes)
        self._file = libc.syscall(
            _OPEN[platform.machine()], given, thread, -1, -1, ctypes.c_ulong(0)
        )
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "the kernel gives no samples (perf_event_open)")
        size = (1 + PAGES) * mmap.PAGESIZE
        self._ring = mmap.mmap(self._file, size)
        self._call = libc.ioctl

    def count(self, on: bool) -> None:
        self._call(self._file, _ENABLE if on else _DISABLE, 0)

    def take(self) -> Iterator[int]:
        """Yields the samples since the last call. Call it while nothing is counted."""
        (head,) = struct.unpack_from("=Q", self._ring, _HEAD)
        (tail,) = struct.unpack_from("=Q", self._ring, _TAIL)
        size = PAGES * mmap.PAGESIZE
        data = self._ring[mmap.PAGESIZE :]
        data += data[: mmap.PAGESIZE]  # a record may go round
        while tail < head:
            kind, _, length = struct.unpack_from("=IHH", data, tail % size)
            if kind == _RECORD_SAMPLE:
                yield struct.unpack_from("=Q", data, tail % size + 8)[0]
            tail += length
        struct.pack_into("=Q", self._ring, _TAIL, head)


class Binaries:
    """Which binary and which of our functions an address belongs to."""

    def __init__(self) -> None:
        """Reads the process's map of memory."""
        rows = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
        found = sorted(
            (*(int(part, 16) for part in row[0].split("-")), int(row[2], 16), row[-1])
            for row in rows
            if "x" in row[1]
        )
        self._begins = [row[0] for row in found]
        self._rows = found
        self._symbols: dict[str, list[tuple[int, str]]] = {}

    def owner(self, address: int) -> str:
        name = Path(self._row(address)[3]).name
        return next(
            (owner for owner, parts in OWNERS.items() if any(part in name for part in parts)),
            OTHERS,
        )

    def function(self, address: int) -> str:
        begin, _, offset, path = self._row(address)
        if path not in self._symbols:
            self._symbols[path] = sorted(_symbols(path))
        symbols = self._symbols[path]
        place = bisect.bisect_right(symbols, (address - begin + offset, "\x7f")) - 1
        return symbols[place][1] if place >= 0 else ""

    def _row(self, address: int) -> tuple[int, int, int, str]:
        place = bisect.bisect_right(self._begins, address) - 1
        row = self._rows[place] if place >= 0 else (0, 0, 0, "")
        return row if address < row[1] else (0, 0, 0, "")  # type: ignore[return-value]


def _symbols(path: str) -> Iterator[tuple[int, str]]:
    """Yields our functions by their offsets in the file. Our linker maps code one to one."""
    listed = subprocess.run(["nm", "-C", "--defined-only", path], capture_output=True, text=True)
    for line in listed.stdout.splitlines():
        address, kind, name = line.split(" ", 2)
        if kind in "tTwW":
            yield int(address, 16), name.replace("(anonymous namespace)::", "").split("(")[0]


def threads() -> list[int]:
    """Returns this thread and those of torch's engine. Others of torch's wait, or spin."""
    tasks = Path("/proc/self/task").iterdir()
    of_engine = (t for t in tasks if (t / "comm").read_text().startswith("pt_autograd"))
    return [os.getpid(), *(int(task.name) for task in of_engine)]


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Runs blocks of each mode in turns, and returns where each was found."""
    torch.set_num_threads(1)
    workload = case.build()
    for _ in range(WARM_UP):
        workload.step()
    synchronize(case.device)
    clocks = [Samples(thread) for thread in threads()]
    chosen = [mode for mode in MODES if mode.name in (PLAIN.name, *MODES_SAMPLED)]
    addresses: dict[str, Counter[int]] = {mode.name: Counter() for mode in chosen}
    steps: Counter[str] = Counter()

    def block(name: str, start: Any) -> None:
        gc.collect()
        stop = start(workload)
        for _ in range(WARM_UP):
            workload.step()
        synchronize(case.device)
        for clock in clocks:
            clock.count(True)
        for _ in range(case.steps):
            workload.step()
        synchronize(case.device)
        for clock in clocks:
            clock.count(False)
            addresses[name].update(clock.take())
        steps[name] += case.steps
        stop()

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for mode in chosen:
            block(mode.name, mode.start)
        chosen.reverse()
    return {
        "case": case.name,
        "description": workload.description,
        "machine": machine(),
        "period_us": PERIOD_US,
        "modes": {
            name: {"steps": steps[name], **by_owner(found, steps[name])}
            for name, found in addresses.items()
        },
    }


def by_owner(addresses: Counter[int], steps: int) -> dict[str, Any]:
    """Returns milliseconds per step by owner, and those of our own functions with the most."""
    binaries = Binaries()
    owners: Counter[str] = Counter(dict.fromkeys((*OWNERS, OTHERS), 0))
    functions: Counter[str] = Counter()
    for address, count in addresses.items():
        owner = binaries.owner(address)
        owners[owner] += count
        if owner == OURS:
            functions[binaries.function(address)] += count
    ms = PERIOD_US / 1000 / steps
    return {
        "samples": addresses.total(),
        "owners_ms": {owner: round(count * ms, 4) for owner, count in owners.items()},
        "functions_ms": {
            name: round(count * ms, 4) for name, count in functions.most_common(FUNCTIONS)
        },
    }


def print_case(result: dict[str, Any]) -> None:
    print(f"\n{result['case']}: {result['description']}")
    print(f"{'ms a step':12}" + "".join(f"{owner:>11}" for owner in (*OWNERS, OTHERS)))
    for name, found in result["modes"].items():
        whole = sum(found["owners_ms"].values())
        row = "".join(f"{ms:11.3f}" for ms in found["owners_ms"].values())
        print(f"{name:12}{row}   {found['owners_ms'][OURS] / whole:.2%} ours")
    for name, ms in result["modes"][MODES_SAMPLED[0]]["functions_ms"].items():
        print(f"    {ms:8.4f}  {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.name for case in CASES if case.ranks == 1]
    parser.add_argument("--cases", nargs="+", default=names, choices=names, metavar="CASE")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each case")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for case in CASES:
        if case.name in options.cases and can_run(case):
            results.append(measure(case, options.seconds))
            print_case(results[-1])
            sys.stdout.flush()
            device = slug(results[0]["machine"]["device"] or "cpu")
            target = options.out / f"whose-time-{device}.json"
            kept.write(target, {"cases": results})
            gc.collect()
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
