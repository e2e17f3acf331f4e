"""Runs a program again, and compares the run with a prediction.

The program runs in a process of its own, by `pytracer run`: for as many steps as the trace has,
under the settings and the limit of the prediction, and with the modules of a plan checkpointed. Its
own trace shows the memory that it needed. It sees a private view of the files, and changes none of
the user's. One line of JSON per verification goes to
`pytracer-verified.jsonl` in the working directory.

The caller names the program. A trace may come from anybody, so nothing in it is run.
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

from pytracer import errors
from pytracer.analysis.allocator import replay, settings as allocator_settings
from pytracer.analysis.allocator.steps import recorded_settings
from pytracer.analysis.answers import training_steps
from pytracer.analysis.facts import devices, timelines, usage
from pytracer.analysis.forecasts.checkpoint_plans import CheckpointPlan
from pytracer.analysis.forecasts.fits import Fits
from pytracer.analysis.forecasts.planned import Plan
from pytracer.analysis.forecasts.verified import Figure, Verified
from pytracer.analysis.forecasts.what_if import WhatIf
from pytracer.basics.version import __version__
from pytracer.data import meta
from pytracer.data.changes import allocator_variables
from pytracer.data.recorded import Trace, load
from pytracer.data.schema import ACTION
from pytracer.sandbox import launch
from pytracer.sandbox.written import Change

Program: TypeAlias = "str | Sequence[str] | bool"  # True: an error says that it is missing
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
_NOTHING = launch.Wish()  # the program may touch nothing
_NO_LIMIT_ON_THE_CPU = (
    "The CPU's allocator takes no limit, so the fit was not tested; the peak was measured."
)


def fits(trace: Trace, answer: Fits, program: Program, wish: launch.Wish = _NOTHING) -> Verified:
    """Runs the program under a limit: the card's memory for torch's allocator.

    Raises:
        errors.UsageError: no program is named, or no CUDA device is large enough.
    """
    words = _words(trace, program)
    here = _machine(answer.device)
    limit = None if answer.card is None else answer.card - answer.beside
    settings = answer.replay.settings
    replayed = replay.replay(trace, settings, limit, answer.device, unlimited=limit is None)
    again = _run(trace, words, answer.device, here, settings, limit, wish)
    peak = replayed.peak_reserved
    figures = (Figure("peak reserved", peak, peak, again.reserved),) if replayed else ()
    return _write("fits", limit, bool(replayed), again, figures, here, replayed.notes)


def plan(
    trace: Trace, answer: CheckpointPlan, program: Program, wish: launch.Wish = _NOTHING
) -> Verified:
    """Runs the program with the chosen plan, and the budget as its limit.

    Raises:
        errors.UsageError: no program is named, it lacks these modules, or there is no device.
    """
    words = _words(trace, program)
    here = _machine(answer.device)
    cuda = answer.device != "cpu"
    # Without a limit, if even the smallest plan exceeds the budget.
    limit = answer.budget if cuda and answer else None
    settings = recorded_settings(trace, answer.device) if cuda else ""
    chosen = answer.chosen
    again = _run(trace, words, answer.device, here, settings, limit, wish, _options(chosen))
    figures = [Figure("peak", chosen.peak, chosen.peak, again.peak)]
    if chosen.peak_reserved is not None:
        figures.append(
            Figure("peak reserved", chosen.peak_reserved, chosen.peak_reserved, again.reserved)
        )
    notes = () if cuda else (_NO_LIMIT_ON_THE_CPU,)
    return _write("checkpoint_plan", limit, True, again, figures, here, notes)


def what_if(
    traces: Sequence[Trace], answer: WhatIf, program: Program, wish: launch.Wish = _NOTHING
) -> Verified:
    """Runs the program, which must have the batch and length of the prediction.

    Raises:
        errors.UsageError: no program is named, or there is no device to run it on.
    """
    trace = traces[0]
    words = _words(trace, program)
    here = _machine(answer.device)
    cuda = answer.device != "cpu"
    settings = recorded_settings(trace, answer.device) if cuda else ""
    again = _run(trace, words, answer.device, here, settings, None, wish)
    figures = [Figure("peak", answer.lowest, answer.highest, again.peak)]
    if answer.reserved is not None:
        figures.append(Figure("peak reserved", *answer.reserved, again.reserved))
    return _write("what_if", None, True, again, figures, here, ())


def limited(settings: str, limit: int) -> dict[str, str]:
    """Variables for a run with so many bytes for torch's allocator, on the CUDA device here.

    Raises:
        errors.UsageError: there is no CUDA device, or it is not larger than the limit.
    """
    return allocator_variables(_configuration(settings, limit, _machine("cuda:0")["total"]))


def ran_out(trace: Trace) -> bool:
    """Whether an allocation failed."""
    return bool((trace.events.action == ACTION["oom"]).any())


def _options(chosen: Plan) -> list[str]:
    """Returns the options of `pytracer run` for a plan."""
    options = ["--checkpoint", ",".join(chosen.modules)] if chosen.modules else []
    return [*options, "--offload", ",".join(chosen.offloaded)] if chosen.offloaded else options


# ---------------------------------------------------------------- the run


@dataclass(frozen=True)
class _Again:
    """The memory that a run needed, in bytes, and how it ended."""

    peak: int
    reserved: int
    ran: bool
    changes: tuple[Change, ...]


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
    """Describes the machine for which the comparison holds.

    Raises:
        errors.UsageError: the answer is about a CUDA device, and there is none.
    """
    facts = {**_torch()}
    if device == "cpu":
        facts |= {"device": "cpu", "total": None, "cuda": None, "cudnn": None}
    elif facts["total"] is None:
        raise errors.UsageError(
            "cannot verify: the answer is about a CUDA device, and there is none here. Without one, "
            "imagine the changed program (pytracer imagine --keep after train.py) and compare: "
            "pytracer diff"
        )
    today = datetime.now(timezone.utc).date().isoformat()
    return {"date": today, "pytracer": __version__, **facts}


@cache
def _torch() -> dict[str, Any]:
    """Asks another process about torch and its device, so that CUDA stays as it is in this one."""
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True)
    if done.returncode:
        raise errors.UsageError(f"cannot verify: torch does not start: {_last_line(done.stderr)}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def _last_line(text: str) -> str:
    last = (text.strip().splitlines() or ["it printed no reason"])[-1]
    return last.removeprefix("pytracer: ")


def _run(
    trace: Trace,
    program: list[str],
    device: str,
    machine: dict[str, Any],
    settings: str,
    limit: int | None,
    wish: launch.Wish,
    options: Sequence[str] = (),
) -> _Again:
    variables = {key: text for key, text in os.environ.items() if not key.endswith("ALLOC_CONF")}
    conf = _configuration(settings, limit, machine["total"])
    if conf:
        variables |= allocator_variables(conf)
    with tempfile.TemporaryDirectory(prefix="pytracer-") as folder:
        file = Path(folder) / "again.pytrace"
        kind = "cpu" if device == "cpu" else "cuda"
        own = ["run", "-o", str(file), "--no-watch", "--device", kind, *_which_steps(trace)]
        command = [sys.executable, "-m", "pytracer", *own, *options, "--", *program]
        done = launch.run(command, variables, wish, [Path(folder)])
        if not file.exists():
            reason = _last_line(done.stderr)
            raise errors.UsageError(
                f"cannot verify: {shlex.join(program)} recorded nothing: {reason}"
            )
        again = load(file)
    failed = ran_out(again)
    if done.returncode and not failed:
        reason = _last_line(done.stderr)
        raise errors.UsageError(f"cannot verify: {shlex.join(program)} failed: {reason}")
    if device not in usage.devices(again):
        raise errors.UsageError(f"cannot verify: {shlex.join(program)} used no memory on {device}")
    return _Again(
        peak=usage.peak(again, device).bytes,
        reserved=devices.counted(again, device, "reserved_bytes.peak") or 0,
        ran=not failed,
        changes=done.changes,
    )


def _configuration(settings: str, limit: int | None, total: int | None) -> str:
    """Returns the text of PYTORCH_ALLOC_CONF with the limit.

    Raises:
        errors.UsageError: the device here is not larger than the limit.
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
    """Returns the options for the trace's steps, and no more if it ends with its last step."""
    ends = timelines.timeline(trace).step_ends
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
    """Returns the comparison, and adds it to the file of verifications."""
    path = Path(FILE).absolute()
    verified = Verified(
        question=question,
        limit=limit,
        was_to_run=was_to_run,
        ran=again.ran,
        figures=tuple(figures) if again.ran else (),
        machine=machine,
        file=str(path),
        notes=tuple(notes),
        changes=again.changes,
    )
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(verified.document()) + "\n")
    except OSError as problem:
        raise errors.CannotWrite(f"{path} cannot be written: {problem.strerror}") from None
    return verified
