"""Runs PyTorch's own tests untraced and traced, and compares them test by test.

    python tools/torch_tests.py FOLDER              # the default selection, a few hours on 2 cores
    python tools/torch_tests.py FOLDER --quick      # about five minutes
    python tools/torch_tests.py FOLDER test_nn.py functorch/test_vmap.py

FOLDER is the `test` folder of PyTorch's source, or an archive of the source (.tar.*, .zip). This
project keeps no part of it. Its version should be near the installed torch: a test that also fails
untraced is compared, but does not count. It needs: pip install expecttest hypothesis psutil.

Each file runs in a process of its own: untraced, in each mode, and untraced once more. If a test
crashes or takes too long, that is its outcome, and the others go on. If it takes too long untraced,
it is listed and not compared. After an interruption the tool resumes. A test whose untraced outcome
varies is listed as flaky. Tests that differ run again, without the others, three times with and
without a trace.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import transparency_page  # noqa: E402
from run_torch_tests import CONTROL, MODES, UNTRACED, Journal  # noqa: E402

RESULTS = transparency_page.TORCH_TESTS
WORK = ROOT / "build" / "torch-tests"
AGAIN, TIMED_OUT = "untraced again", "timed out"
MOST_RESTARTS = 40
TRIES = 3

QUICK = [
    "autograd/test_complex.py",
    "autograd/test_logging.py",
    "nn/test_module_hooks.py",
    "test_autograd_fallback.py",
    "test_stateless.py",
]
DEFAULT = [
    *QUICK,
    "autograd/test_functional.py",
    "test_autograd.py",
    "test_nn.py",
    "nn/test_convolution.py",
    "nn/test_dropout.py",
    "nn/test_embedding.py",
    "nn/test_init.py",
    "nn/test_lazy_modules.py",
    "nn/test_load_state_dict.py",
    "nn/test_multihead_attention.py",
    "nn/test_packed_sequence.py",
    "nn/test_parametrization.py",
    "nn/test_pooling.py",
    "nn/test_pruning.py",
    "test_optim.py",
    "optim/test_lrscheduler.py",
    "optim/test_optim.py",
    "optim/test_swa_utils.py",
    "functorch/test_ac.py",
    "functorch/test_eager_transforms.py",
    "functorch/test_logging.py",
    "functorch/test_memory_efficient_fusion.py",
    "functorch/test_rearrange.py",
    "functorch/test_control_flow.py",
    "test_utils.py",
    "profiler/test_execution_trace.py",
    "profiler/test_memory_profiler.py",
    "profiler/test_profiler.py",
    "profiler/test_profiler_tree.py",
    "profiler/test_record_function.py",
    "profiler/test_torch_tidy.py",
    "dynamo/test_activation_checkpointing.py",
    "dynamo/test_autograd_function.py",
    "dynamo/test_backward_higher_order_ops.py",
    "dynamo/test_ctx_manager.py",
    "dynamo/test_guard_manager.py",
    "dynamo/test_higher_order_ops.py",
    "dynamo/test_hooks.py",
    "dynamo/test_logging.py",
    "dynamo/test_misc.py",
    "dynamo/test_modules.py",
    "dynamo/test_optimizers.py",
    "dynamo/test_profiler.py",
    "dynamo/test_recompiles.py",
    "dynamo/test_repros.py",
    "dynamo/test_subclasses.py",
    "test_custom_ops.py",
    "test_dataloader.py",
    "test_dispatch.py",
    "test_flop_counter.py",
    "test_functionalization.py",
    "test_fx.py",
    "test_module_tracker.py",
    "test_multiprocessing.py",
    "test_namedtensor.py",
    "test_overrides.py",
    "test_python_dispatch.py",
    "test_subclass.py",
    "test_torch.py",
    "test_view_ops.py",
    "test_weak.py",
]


@dataclass
class Run:
    """One file in one mode: a process, and another after each crash."""

    tests: Path  # the folder of all tests
    file: str
    mode: str
    out: Path
    only: tuple[str, ...] = ()
    seconds: float = 120  # for one test

    def finish(self) -> dict[str, dict[str, Any]]:
        """Runs all tests. Returns the outcomes, also of tests that ended their process."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(MOST_RESTARTS):
            journal = Journal(self.out)
            if journal.ended:
                return journal.outcomes
            self._close(*self._run_on())
        self._write(end=True, gave_up=True)
        return Journal(self.out).outcomes

    def _run_on(self) -> tuple[str, str]:
        """Runs tests without an outcome. Returns the outcome of the running one, and the reason."""
        mode = UNTRACED if self.mode == AGAIN else self.mode
        with self.out.with_suffix(".log").open("a") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    str(ROOT / "tools" / "run_torch_tests.py"),
                    str(self.tests / self.file),
                    mode,
                    str(self.out),
                    *self.only,
                ],
                cwd=self.tests,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            RUNNING.add(process)
            begun = time.time()
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    news = max(begun, self.out.stat().st_mtime if self.out.exists() else 0)
                    if time.time() - news > self.seconds:
                        return TIMED_OUT, f"{self.seconds:.0f} s"
            finally:
                kill_group(process)
        return "crashed", f"exit status {process.returncode}"

    def _close(self, outcome: str, why: str) -> None:
        """Notes the outcome of the test that ended its process, or that the file cannot run."""
        journal = Journal(self.out)
        if journal.ended:
            return
        if journal.running:
            self._write(test=journal.running, outcome=outcome, why=why)
        else:
            lines = self.out.with_suffix(".log").read_text(errors="replace").splitlines()
            self._write(end=True, problem=f"{outcome}, {why}: {lines[-1] if lines else ''}")

    def _write(self, **row: Any) -> None:
        with self.out.open("a") as out:
            out.write(json.dumps(row) + "\n")


RUNNING: set["subprocess.Popen[bytes]"] = set()


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kills the process that was started here, and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    RUNNING.discard(process)


def interrupted(*_: object) -> None:
    """Ends the running tests after Ctrl-C. The next run of this tool resumes here."""
    for process in tuple(RUNNING):
        kill_group(process)
    os._exit(130)


def environment() -> dict[str, str]:
    """Returns the environment of all runs: one thread, fixed hashes, no colours or shared cache."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCH_EXTENSIONS_DIR": str(WORK / "extensions"),  # kept for the next run
    }


def compare(tests: Path, file: str, modes: list[str], seconds: float) -> dict[str, Any]:
    """Compares one file in every mode. Returns a row of the table."""
    runs, traced = {}, product()
    for mode in (UNTRACED, *modes, AGAIN):
        where = torch_version() if mode in (UNTRACED, AGAIN) else traced
        out = WORK / where / mode.replace(" ", "-") / f"{file.replace('/', '.')}.jsonl"
        runs[mode] = Run(tests, file, mode, out, seconds=seconds).finish()
    first, again = runs[UNTRACED], runs[AGAIN]
    slow = sorted(name for name in first if word(first, name) == TIMED_OUT)
    flaky = sorted(name for name in first | again if word(first, name) != word(again, name))
    row: dict[str, Any] = {
        "file": file,
        "untraced": dict(Counter(outcome["outcome"] for outcome in first.values())),
        "seconds": round(sum(outcome.get("seconds", 0) for outcome in first.values())),
        "slow": slow,
        "flaky": flaky,
        "differs": {},
    }
    if not first:
        log = WORK / torch_version() / UNTRACED / f"{file.replace('/', '.')}.log"
        row["problem"] = (log.read_text(errors="replace").splitlines() or ["no test"])[-1][:300]
    for mode in modes:
        names = [
            name
            for name in {**first, **runs[mode]}
            if word(first, name) != word(runs[mode], name) and name not in {*slow, *flaky}
        ]
        tried = try_again(tests, file, mode, tuple(names), seconds) if names else {}
        row["differs"][mode] = [
            {
                "test": name,
                "untraced": word(first, name),
                "traced": word(runs[mode], name),
                "why": runs[mode].get(name, {}).get("why", ""),
                "again": f"{tried[name]} of {TRIES}",
            }
            for name in sorted(names)
            if name in tried
        ]
        row["flaky"] = sorted({*row["flaky"], *set(names) - set(tried)})
        if mode == "hooks" and names:
            compare_with_torchs_hooks(tests, file, row["differs"][mode], seconds)
    return row


def compare_with_torchs_hooks(
    tests: Path, file: str, differing: list[dict[str, Any]], seconds: float
) -> None:
    """Adds each test's outcome with torch's own hooks and no trace: equal changes are not ours."""
    names = tuple(found["test"] for found in differing)
    chosen = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    out = WORK / torch_version() / "control" / f"{file.replace('/', '.')}.{chosen}.jsonl"
    outcomes = Run(tests, file, CONTROL, out, names, seconds).finish()
    for found in differing:
        found["torchs_own_hooks"] = word(outcomes, found["test"])


def word(outcomes: dict[str, dict[str, Any]], name: str) -> str:
    return str(outcomes.get(name, {}).get("outcome", "not run"))


def try_again(
    tests: Path, file: str, mode: str, names: tuple[str, ...], seconds: float
) -> dict[str, int]:
    """Returns in how many tries each test differs, run alone, unless it varies untraced."""
    chosen = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    folder = WORK / product() / "again" / f"{file.replace('/', '.')}.{chosen}"
    traced, untraced = [], []
    for number in range(TRIES):
        for which, found in ((mode, traced), (UNTRACED, untraced)):
            out = folder / f"{mode} {number} {which}.jsonl".replace(" ", "-")
            found.append(Run(tests, file, which, out, names, seconds).finish())
    return {
        name: sum(word(one, name) != word(untraced[0], name) for one in traced)
        for name in names
        if len({word(one, name) for one in untraced}) == 1
    }


# -------------------------------------------------------------------------- what is compared


def unpack(source: Path) -> Path:
    """Returns the folder of tests, from a folder or an archive."""
    if source.is_dir():
        return source / "test" if (source / "test" / "test_autograd.py").exists() else source
    folder = WORK / "tests" / hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:12]
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        with (
            zipfile.ZipFile(source) if source.suffix == ".zip" else tarfile.open(source) as archive
        ):
            if isinstance(archive, zipfile.ZipFile):
                names = [name for name in archive.namelist() if is_of_tests(name)]
                archive.extractall(partial, names)
            else:
                members = [member for member in archive if is_of_tests(member.name)]
                archive.extractall(partial, members, filter="data")
        partial.rename(folder)
    return next(folder.glob("**/test/test_autograd.py")).parent


def is_of_tests(name: str) -> bool:
    parts = Path(name).parts
    return "test" in parts[:2] or "tools" in parts[1:2]


def torch_version() -> str:
    from importlib.metadata import version

    return f"torch-{version('torch')}"


def product() -> str:
    """Returns a digest of pytracer's files: results of another version do not count."""
    files = [*(ROOT / "pytracer").rglob("*.py"), *(ROOT / "pytracer").glob("*.so")]
    content = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in sorted(files))
    return f"pytracer-{hashlib.sha256(content).hexdigest()[:12]}"


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def version_of(tests: Path) -> str:
    version = tests.parent / "version.txt"
    return version.read_text().strip() if version.exists() else "unknown"


# -------------------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, nargs="?", help="a folder of tests, or an archive")
    parser.add_argument("files", nargs="*", help="instead of the default selection")
    parser.add_argument("--also", nargs="+", default=[], help="files beside the selection")
    parser.add_argument("--quick", action="store_true", help="the selection of five minutes")
    parser.add_argument("--modes", default=",".join(MODES), help="some of them, with commas")
    parser.add_argument("--jobs", type=int, default=2, help="how many files at once")
    parser.add_argument("--seconds", type=float, default=180, help="for one test")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where a run of the default selection goes"
    )
    options = parser.parse_args()
    if options.source is None:
        parser.error("name the folder of PyTorch's tests, or an archive of its source")
    chosen = [*(options.files or (QUICK if options.quick else DEFAULT)), *options.also]
    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, interrupted)
    results = run(unpack(options.source), chosen, options)
    whole = not options.files and not options.quick
    path = options.results if whole else WORK / "results.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    if path == RESULTS:
        transparency_page.write()
    print(transparency_page.torch_tests(results))
    sys.exit(any(found for row in results["files"] for found in row["differs"].values()))


def run(tests: Path, files: list[str], options: argparse.Namespace) -> dict[str, Any]:
    tests, modes = tests.resolve(), options.modes.split(",")
    there = [file for file in files if (tests / file).exists()]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(compare, tests, file, modes, options.seconds) for file in there]
        rows = []
        for future in concurrent.futures.as_completed(futures):
            row = future.result()
            rows.append(row)
            differ = {mode: len(found) for mode, found in row["differs"].items() if found}
            print(
                f"{row['file']}: {row['untraced']}, {row['seconds']} s, differ {differ}", flush=True
            )
    missing = [
        {"file": f, "untraced": {}, "flaky": [], "differs": {}} for f in files if f not in there
    ]
    return {
        "about": {
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch_version().removeprefix("torch-"),
            "tests": version_of(tests),
            "python": platform.python_version(),
            "pytracer": commit(),
            "machine": platform.machine(),
        },
        "modes": modes,
        "files": sorted([*rows, *missing], key=lambda row: files.index(row["file"])),
    }


if __name__ == "__main__":
    main()
