"""Runs a program again to see whether what was predicted of it happens.

It runs in a process of its own, by `pytracer run`: for as many steps as the trace has, under the settings
and the limit that were asked about, and with the modules checkpointed that a plan names. What it
needs is read from the trace that this leaves. One line of JSON per verification goes to
`pytracer-verified.jsonl` in the working directory.

The program is the caller's to name: a trace may be anybody's, and nothing in it is run.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from pytracer import errors, meta
from pytracer.analysis.allocator import replay, settings as allocator_settings
from pytracer.analysis.answers import training_steps
from pytracer.analysis.facts import devices, phases, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.forecasts.checkpoint_plans import CheckpointPlan, Plan
from pytracer.analysis.forecasts.fits import Fits
from pytracer.analysis.forecasts.verified import Figure, Verified
from pytracer.analysis.forecasts.what_if import WhatIf
from pytracer.recorded import Trace, load
from pytracer.schema import ACTION, PHASE
from pytracer.version import __version__

Program: TypeAlias = "str | Sequence[str] | bool"  # True: what is missing is said
FILE = "pytracer-verified.jsonl"

_ASK = """
import json, torch
gpu = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "cudnn": torch.backends.cudnn.version() if gpu else None,
    "device": torch.cuda.get_device_name() if gpu else "cpu",
    "total": torch.cuda.mem_get_info()[1] if gpu else None,
}))
"""
_NO_LIMIT_ON_THE_CPU = (
    "The CPU's allocator takes no limit, so the fit was not tested; the peak was measured."
)


def fits(trace: Trace, found: Fits, program: Program) -> Verified:
    """Runs it with what the card has for torch's allocator as the limit.

    Raises:
        errors.UsageError: no program, or no CUDA device that is large enough.
    """
    words = _words(trace, program)
    here = _machine(found.device)
    limit = None if found.card is None else found.card - found.beside
    settings = found.replay.settings
    told = replay.replay(trace, settings, limit, found.device, unlimited=limit is None)
    again = _run(trace, words, found.device, here, settings, limit)
    figures = (Figure("peak reserved", told.peak_reserved, told.peak_reserved, again.reserved),)
    return _write("fits", limit, bool(told), again, figures if told else (), here, told.notes)


def plan(trace: Trace, found: CheckpointPlan, program: Program) -> Verified:
    """Runs the chosen plan, with the budget as the limit.

    Raises:
        errors.UsageError: no program, no device to run it on, or it has not these modules.
    """
    words = _words(trace, program)
    here = _machine(found.device)
    cuda = found.device != "cpu"
    limit = found.budget if cuda and found else None  # else: what the smallest plan needs
    settings = replay.recorded_settings(trace, found.device) if cuda else ""
    chosen = found.chosen
    again = _run(trace, words, found.device, here, settings, limit, _options(chosen))
    if chosen.modules and not again.recomputed:
        raise errors.UsageError(
            f"no model that {shlex.join(words)} calls has all of {', '.join(chosen.modules)}"
        )
    figures = [Figure("peak", chosen.peak, chosen.peak, again.peak)]
    if chosen.peak_reserved is not None:
        figures.append(
            Figure("peak reserved", chosen.peak_reserved, chosen.peak_reserved, again.reserved)
        )
    notes = () if cuda else (_NO_LIMIT_ON_THE_CPU,)
    return _write("checkpoint_plan", limit, True, again, figures, here, notes)


def what_if(traces: Sequence[Trace], found: WhatIf, program: Program) -> Verified:
    """Runs the program, which is to be the one with that batch and length.

    Raises:
        errors.UsageError: no program, or no device to run it on.
    """
    trace = traces[0]
    words = _words(trace, program)
    here = _machine(found.device)
    cuda = found.device != "cpu"
    settings = replay.recorded_settings(trace, found.device) if cuda else ""
    again = _run(trace, words, found.device, here, settings, None)
    figures = [Figure("peak", found.lowest, found.highest, again.peak)]
    if found.reserved is not None:
        figures.append(Figure("peak reserved", *found.reserved, again.reserved))
    return _write("what_if", None, True, again, figures, here, ())


def _options(chosen: Plan) -> list[str]:
    """Of `pytracer run`."""
    found = ["--checkpoint", ",".join(chosen.modules)] if chosen.modules else []
    return [*found, "--offload", ",".join(chosen.offloaded)] if chosen.offloaded else found


# ---------------------------------------------------------------- the run


@dataclass(frozen=True)
class _Again:
    """What a run needed. Sizes are bytes."""

    peak: int
    reserved: int
    ran: bool
    recomputed: bool


def _words(trace: Trace, program: Program) -> list[str]:
    if isinstance(program, str):
        program = shlex.split(program)
    if program and not isinstance(program, bool):
        return [str(word) for word in program]
    command = meta.of(trace).command
    was = f" (it was {command}, the trace says)" if command else ""
    raise errors.UsageError(
        f"verify= needs the program to run again{was}: verify=['train.py', '--epochs', '1'], or at the "
        "command line --verify -- train.py --epochs 1"
    )


def _machine(device: str) -> dict[str, Any]:
    """What the answer will hold for.

    Raises:
        errors.UsageError: the answer is about a CUDA device, and there is none.
    """
    found = {**_torch()}
    if device == "cpu":
        found |= {"device": "cpu", "total": None, "cuda": None, "cudnn": None}
    elif found["total"] is None:
        raise errors.UsageError(
            "cannot verify: the answer is about a CUDA device, and there is none here"
        )
    today = datetime.now(timezone.utc).date().isoformat()
    return {"date": today, "pytracer": __version__, **found}


@cache
def _torch() -> dict[str, Any]:
    """Asked of another process: in this one CUDA stays as it is."""
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True)
    if done.returncode:
        raise errors.UsageError(f"cannot verify: torch does not answer: {_last_line(done.stderr)}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1]


def _run(
    trace: Trace,
    program: list[str],
    device: str,
    machine: dict[str, Any],
    settings: str,
    limit: int | None,
    options: Sequence[str] = (),
) -> _Again:
    variables = {key: text for key, text in os.environ.items() if not key.endswith("ALLOC_CONF")}
    conf = _configuration(settings, limit, machine["total"])
    if conf:
        variables |= {"PYTORCH_ALLOC_CONF": conf, "PYTORCH_CUDA_ALLOC_CONF": conf}
    with tempfile.TemporaryDirectory(prefix="pytracer-") as folder:
        file = Path(folder) / "again.pytrace"
        kind = "cpu" if device == "cpu" else "cuda"
        own = ["run", "-o", str(file), "--no-watch", "--device", kind, *_which_steps(trace)]
        command = [sys.executable, "-m", "pytracer", *own, *options, "--", *program]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        if not file.exists():
            said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise errors.UsageError(
                f"cannot verify: {shlex.join(program)} recorded nothing: {said}"
            )
        again = load(file)
    failed = bool((again.events.action == ACTION["oom"]).any())
    if done.returncode and not failed:
        said = _last_line(done.stderr)
        raise errors.UsageError(f"cannot verify: {shlex.join(program)} failed: {said}")
    if device not in usage.devices(again):
        raise errors.UsageError(f"cannot verify: {shlex.join(program)} used nothing of {device}")
    return _Again(
        peak=usage.peak(again, device).bytes,
        reserved=devices.counted(again, device, "reserved_bytes.peak") or 0,
        ran=not failed,
        recomputed=bool((allocations(again).phase == PHASE["recompute"]).any()),
    )


def _configuration(settings: str, limit: int | None, total: int | None) -> str:
    """PYTORCH_ALLOC_CONF with the limit.

    Raises:
        errors.UsageError: the device here has less than that.
    """
    if limit is None or total is None:
        return settings
    if limit >= total:
        raise errors.UsageError(
            f"cannot verify: the device here has {total:,} bytes, and the answer is about "
            f"{limit:,} for torch's allocator"
        )
    fraction = f"per_process_memory_fraction:{(limit + 0.5) / total!r}"
    return allocator_settings.joined(settings, fraction)


def _which_steps(trace: Trace) -> list[str]:
    """Those of the trace; and no more, if the trace ends with its last step."""
    ends = phases.timeline(trace).step_ends
    first, steps = training_steps.first_step(trace), len(ends)
    made = trace.events.ticks[trace.events.action == ACTION["alloc"]]
    if not steps or (len(made) and made[-1] > ends[-1]):
        return ["--steps", "all"] if not first else ["--schedule", f"{first},0,{2**31}"]
    return ["--schedule", f"{first},0,{steps}", "--stop"]


def _write(
    question: str,
    limit: int | None,
    was_to_run: bool,
    again: _Again,
    figures: Sequence[Figure],
    machine: dict[str, Any],
    notes: Sequence[str],
) -> Verified:
    """The answer, which is also added to the file of errors."""
    path = Path(FILE).absolute()
    found = Verified(
        question=question,
        limit=limit,
        was_to_run=was_to_run,
        ran=again.ran,
        figures=tuple(figures) if again.ran else (),
        machine=machine,
        file=str(path),
        notes=tuple(notes),
    )
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found.document()) + "\n")
    except OSError as problem:
        raise errors.CannotWrite(f"{path} cannot be written: {problem.strerror}") from None
    return found
