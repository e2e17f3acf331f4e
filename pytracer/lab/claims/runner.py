"""Runs the experiments of the claims, each in a process of its own, and asks the judges.

Results in the folder are used again, so an interrupted run can go on later. An experiment that dies,
hangs or runs out of memory leaves a result that says so.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.lab.claims import worker
from pytracer.lab.claims.claim import FAILED, MOST_UNKNOWN, SKIPPED, Claim, Verdict
from pytracer.lab.claims.experiment import Experiment

Result = dict[str, Any]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """The folder, the device and the scale of a run."""

    folder: Path
    device: str
    scale: str
    again: bool = False
    kept_only: bool = False  # runs no experiment; judges the kept results
    command: tuple[str, ...] = (sys.executable, "-m", "pytracer.lab.claims.worker")


@dataclass(frozen=True)
class Row:
    """A claim and its verdict."""

    claim: Claim
    verdict: Verdict
    unknown_share: float | None  # of its worst trace; None if it has no traces


@dataclass
class Outcome:
    """All rows, and the results that they come from."""

    plan: Plan
    rows: list[Row]
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether an experiment failed, or a judge missed a figure."""
        ended = any(result["status"] == "failed" for result in self.results.values())
        return ended or any(row.verdict.verdict == FAILED for row in self.rows)

    @property
    def unexplained(self) -> list[Row]:
        """Claims with a trace that leaves too much of its peak unknown."""
        return [row for row in self.rows if (row.unknown_share or 0.0) > MOST_UNKNOWN]


def run(
    claims: Sequence[Claim],
    known: Mapping[str, Experiment],
    plan: Plan,
    progress: Progress = lambda _: None,
) -> Outcome:
    """Runs the experiments of these claims, in the order of the claims.

    Raises:
        errors.UsageError: only kept results are wanted, and the folder does not exist.
        errors.CannotWrite: the folder cannot be made.
    """
    if plan.kept_only and not plan.folder.is_dir():
        raise errors.UsageError(
            f"nothing is kept in {plan.folder}, which is no folder: measure without --kept first, "
            "or name another with --out"
        )
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.CannotWrite(
            f"cannot make the folder {plan.folder}: {error.strerror}"
        ) from None
    names = list(dict.fromkeys(n for c in claims for n in (*c.experiments, *c.welcome)))
    results: dict[str, Result] = {}
    for number, name in enumerate(names, 1):
        head = f"[{number}/{len(names)}] {name}"

        def tell(said: str, head: str = head) -> None:
            progress(f"{head}: {said}")

        results[name] = _result(name, known[name], plan, tell)
    return Outcome(plan, [judged(claim, results) for claim in claims], results)


def judged(claim: Claim, results: Mapping[str, Result]) -> Row:
    """The claim's verdict on the results."""
    share = _unknown_share(claim, results)
    for status, without in (("failed", FAILED), ("skipped", SKIPPED)):
        for name in claim.experiments:
            if results[name]["status"] == status:
                return Row(claim, Verdict(without, "", f"{name}: {results[name]['reason']}"), share)
    names = (*claim.experiments, *claim.welcome)
    common = ("device", "scale")
    measured = {
        name: {**{key: results[name][key] for key in common}, **results[name]["figures"]}
        for name in names
        if results[name]["status"] == "done"
    }
    try:
        verdict = claim.judge(measured)
    except (KeyError, ZeroDivisionError) as error:
        reason = f"the measurements do not have what the rule reads ({error!r})"
        return Row(claim, Verdict(FAILED, "", reason), share)
    lost = [name for name in claim.welcome if results[name]["status"] == "failed"]
    notes = [verdict.because] if verdict.because else []
    notes += [f"without {name}, which failed: {results[name]['reason']}" for name in lost]
    return Row(claim, replace(verdict, because="; ".join(notes)), share)


def _unknown_share(claim: Claim, results: Mapping[str, Result]) -> float | None:
    """The unknown share of the claim's worst trace."""
    shares = [
        trace["unknown_share"]
        for name in (*claim.experiments, *claim.welcome)
        for trace in results[name].get("traces", {}).values()
    ]
    return max(shares, default=None)


# ---------------------------------------------------------------------- one experiment


def _result(name: str, experiment: Experiment, plan: Plan, progress: Progress) -> Result:
    identity = worker.identity(name, plan.device, plan.scale)
    good = ("done", "failed") if plan.kept_only else ("done",)
    kept = None if plan.again else _kept(plan.folder / f"{name}.json", identity, good)
    if kept is not None:
        progress(f"measured before, {kept['seconds']} s")
        return kept
    missing = experiment.missing(plan.device)
    if not missing and plan.kept_only:
        missing = "not measured yet: run it without --kept"
    if missing:
        progress(f"skipped: {missing}")
        result = {**identity, "status": "skipped", "reason": missing}
        result |= {"figures": {}, "traces": {}, "seconds": 0.0}
        if plan.kept_only:
            return result
    else:
        progress("running")
        result = _conducted(
            name, identity, experiment.seconds[plan.scale == "full"], experiment.several, plan
        )
        said = "" if result["status"] == "done" else f": {result['reason']}"
        progress(f"{result['status']}, {result['seconds']} s{said}")
    worker.write(plan.folder, result)
    return result


def _kept(path: Path, identity: Mapping[str, Any], good: tuple[str, ...]) -> Result | None:
    """The kept result of the same experiment on the same software, if its status is good."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = isinstance(result, dict) and all(result.get(k) == v for k, v in identity.items())
    return result if same and result.get("status") in good else None


def _conducted(name: str, identity: Result, limit: int, several: bool, plan: Plan) -> Result:
    """Runs the worker. If it leaves no result, makes one that says how it ended."""
    path, log = plan.folder / f"{name}.json", plan.folder / f"{name}.log"
    path.unlink(missing_ok=True)
    words = [*plan.command, name, "--device", plan.device, "--scale", plan.scale]
    words += ["--out", str(plan.folder)]
    began = time.monotonic()
    # A session of its own, so that its child processes end with it, and with this process.
    with log.open("wb") as output, _ends_when_terminated():
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=_environment(several, plan.device),
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    try:
        result: Result = json.loads(path.read_text(encoding="utf-8"))
        return result
    except (OSError, ValueError):
        reason = _how_it_ended(code, limit, log)
    return {
        **identity,
        "status": "failed",
        "reason": reason,
        "figures": {},
        "traces": {},
        "seconds": round(time.monotonic() - began, 1),
    }


@contextlib.contextmanager
def _ends_when_terminated() -> Iterator[None]:
    """Turns SIGTERM into SystemExit, so that the worker ends before this process does."""

    def end(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, end) if in_main else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _environment(several: bool, device: str) -> dict[str, str]:
    """The environment of the worker."""
    if device == "cpu":
        # Threads that spin while they wait take cores from the threads they wait for.
        return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    if several:
        return dict(os.environ)
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": first}


def _how_it_ended(code: int | None, limit: int, log: Path) -> str:
    if code is None:
        return f"did not finish in {limit} s and was ended; see {log}"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = f": {' '.join(lines[-1].split())[:200]}" if lines else ""
    if code < 0:
        name = signal.Signals(-code).name
        killed = " (out of memory, perhaps)" if code == -signal.SIGKILL else ""
        return f"died by {name}{killed}{last}"
    return f"ended with exit code {code}{last}"
