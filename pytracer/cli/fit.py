"""`pytracer fit`: finds what makes a program fit on a card, and runs it so."""

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pytracer import errors
from pytracer.cli import imagining, output, progress
from pytracer.cli.command import Command


class Fit(Command):
    """Find changes that make a program fit on a card, without an edit; exit code 3 if none does.

    Imagines the program as it is, and under changes that `pytracer run --apply` can
    make: settings of the allocator, a fused optimizer, views of DDP's buckets,
    checkpoints of chosen modules, and micro-batches of transformers' Trainer. The
    quickest that fits is written as a plan.

      pytracer fit train.py --on 24GiB
      pytracer run --apply plan.toml train.py      runs it under the plan
      pytracer fit --on RTX4090 --keep-time 1.1 train.py --batch 32
      pytracer fit --on 24GiB --run train.py       also runs it, and compares
      pytracer fit train.pytrace --on 24GiB        from a trace, by replay
      pytracer fit --hf FOLDER --batch 8 --on 16GiB

    A size alone means an H100 of that size. Options for pytracer come before the
    script; --on, -o, -f, --run, --minimise, --keep-time, --allow and --json may
    follow it.
    """

    name = "fit"
    parser_options: ClassVar[Mapping[str, Any]] = {
        "usage": "pytracer fit [options] (SCRIPT | -m MODULE | TRACE | --hf FOLDER)",
        "allow_abbrev": False,
    }
    runs_a_program: ClassVar[bool] = True
    may_follow: ClassVar[tuple[str, ...]] = (
        *("--on", "-o", "--output", "-f", "--force"),
        *("--run", "--minimise", "--keep-time", "--allow", "--json"),
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        imagining.add_run(parser, on="the card, or its size: RTX4090, 24GiB (default: H100)")
        parser.add_argument(
            "-o",
            "--output",
            type=Path,
            metavar="FILE",
            default=Path("plan.toml"),
            help="where to write the plan (default: plan.toml)",
        )
        parser.add_argument("-f", "--force", action="store_true", help="replace that file")
        parser.add_argument(
            "--run", dest="run_it", action="store_true", help="run the program under the plan"
        )
        parser.add_argument(
            "--minimise", choices=("peak",), help="the smallest peak, even if more fits"
        )
        parser.add_argument(
            "--keep-time",
            type=_ratio,
            metavar="RATIO",
            default=float("inf"),
            help="the most that a step may take, say 1.1 of what it takes now",
        )
        parser.add_argument(
            "--allow",
            type=_allowed,
            metavar="LIST",
            default=(),
            help="also what changes numbers, if nothing else fits: 8bit, bf16, lora (with --hf)",
        )
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        from pytracer.analysis.forecasts import fitting
        from pytracer.basics.files import refuse_to_overwrite

        refuse_to_overwrite(options.output, overwrite=options.force)
        _check_allowed(options)
        wanted = fitting.Wanted(options.minimise is not None, options.keep_time, options.allow)
        on = options.on
        is_size = on[:1].isdigit()
        if is_size:
            if options.capacity is not None:
                raise errors.UsageError(f"--on {on} is a size already: leave out --capacity")
            options.on, options.capacity = "H100", on
        if options.run_it:
            _require_device(options)
        if _is_trace(options.program):
            found = _of_trace(options, wanted)
        else:
            plan = imagining.plan(options, self.name)
            card = imagining.card(options.on, plan.capacity)
            found = _of_program(plan, card, options.rank, wanted)
        return _answer(found, options, on)


def _ratio(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a ratio of 1 or more, say 1.1")
    return number


def _allowed(text: str) -> tuple[str, ...]:
    from pytracer.analysis.forecasts import fitting

    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in fitting.ALLOWED:
            there = ", ".join(fitting.ALLOWED)
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {there}")
    return names


def _check_allowed(options: argparse.Namespace) -> None:
    """Refuses what cannot be tried here."""
    if options.allow and _is_trace(options.program):
        raise errors.UsageError("--allow needs a program, and this is a trace")
    if "lora" in options.allow and options.hf is None:
        raise errors.UsageError(
            "--allow lora is for --hf FOLDER: a script calls peft.get_peft_model itself"
        )
    needed = {"8bit": "torchao", "lora": "peft"}
    for package in (needed[name] for name in options.allow if name in needed):
        if importlib.util.find_spec(package) is None:
            raise errors.UsageError(f"--allow needs {package}: pip install {package}")


def _require_device(options: argparse.Namespace) -> None:
    """Refuses --run where nothing can run, before the search."""
    from pytracer.reading import verify

    if options.hf is not None or _is_trace(options.program):
        what = "--hf has none" if options.hf is not None else "this is a trace"
        raise errors.UsageError(f"--run needs a program, and {what}")
    verify.limited("", 0)


def _is_trace(program: list[str]) -> bool:
    return len(program) == 1 and Path(program[0]).suffix in (".pytrace", ".pickle")


def _of_trace(options: argparse.Namespace, wanted: Any) -> Any:
    from pytracer.analysis.forecasts import fitting
    from pytracer.cli.predict import require_gpu

    loaded = output.read(Path(options.program[0]))
    require_gpu(loaded, None)
    card = imagining.card(options.on, _size(options.capacity)).card
    with progress.doing("replaying settings and checkpoints"):
        return fitting.by_replay(loaded.data, card.capacity, wanted)


def _size(text: str | None) -> int | None:
    from pytracer.basics.units import parse_size

    return None if text is None else parse_size(text)


def _of_program(plan: Any, card: Any, ranks: str | None, wanted: Any) -> Any:
    """Searches for the rank that needs most. The others must fit under its plan, too."""
    from pytracer.analysis.forecasts import fitting

    with tempfile.TemporaryDirectory() as folder:
        keep = Path(folder)
        answers = list(imagining.imagine(plan, card, ranks, keep))
        for one in answers:
            if one.fits is None:
                raise errors.CannotImagine(f"cannot be imagined: {one.imagined.problem}")
        fullest = max(answers, key=lambda one: one.fits.surely_needs)

        def imagine(changes: Any, rank: int = fullest.rank) -> Any:
            changed = replace(plan, card=card.card.name, rank=rank, changes=changes)
            what = "; ".join(_named(changes))
            with progress.doing(f"imagining {card.card.name} with {what}"):
                answer = imagining.one(changed, card, keep)
            trace = answer.imagined.trace
            return (None if trace is None else trace.data), answer.imagined.problem

        first = fullest.imagined.trace.data
        found = fitting.search(imagine, first, card.card.capacity, wanted)
        others = [one.rank for one in answers if one is not fullest] if found.chosen.fits else []
        for rank in others if found.chosen.changes else []:
            trace, problem = imagine(found.chosen.changes, rank)
            found = fitting.with_rank(found, rank, trace, problem)
    return found


def _named(changes: Any) -> list[str]:
    from pytracer.export import fit_text

    return list(fit_text.named(changes))


# ---------------------------------------------------------------- the answer


def _answer(found: Any, options: argparse.Namespace, on: str) -> int:
    from pytracer.export import fit_text, terminal
    from pytracer.reading import plan_file

    screen = terminal.here()
    best = found.chosen
    document = fit_text.document(found)
    program = shlex.join(options.program) or f"--hf {options.hf}"
    if not options.json:
        print(fit_text.render(found, screen))
    if best.changes:
        promised = {
            "card": found.card,
            "peak": best.peak,
            "reserved": best.reserved,
            "needs": best.needs,
            "time": round(best.time_ratio, 4),
            "time_at_most": round(best.time_at_most, 4),
            "fits": best.fits,
        }
        saved = plan_file.Saved(best.changes, promised)
        plan_file.write(options.output, saved, f"pytracer fit --on {on} {program}")
        if not options.json:
            _print_use(best, options, program, screen)
    if not found and not options.json:
        _print_smallest(best, screen)
    code = 0 if found else errors.BudgetExceeded.exit_code
    if options.run_it and found:
        ran = _run(found, options)
        document["ran"] = ran
        code = _print_ran(found, ran, screen, as_json=options.json)
    elif options.run_it:
        output.tell("pytracer: not run, because nothing that was tried surely fits")
    if options.json:
        output.print_json(document)
    return code


def _print_use(best: Any, options: argparse.Namespace, program: str, screen: Any) -> None:
    from pytracer.export import fit_text

    print()
    if options.hf is None and not _is_trace(options.program):
        text = f"pytracer run --apply {shlex.quote(str(options.output))} {program}"
        print("\n".join(screen.paragraph("run it", text)))
    else:
        print("\n".join(screen.paragraph("plan", f"written to {options.output}")))
    lines = fit_text.code(best, screen)
    if lines:
        print("\n".join(["or write", *lines]))


def _print_smallest(best: Any, screen: Any) -> None:
    from pytracer.imagined import cards

    enough = [one for one in cards.known() if one.capacity >= best.needs]
    if enough:
        card = min(enough, key=lambda one: one.capacity)
        text = f"the smallest card for that is {card.name}"
    else:
        text = "no card that pytracer knows is large enough: use more ranks, and shard"
    print("\n".join(screen.paragraph("card", text)))


# ---------------------------------------------------------------- --run


def _run(found: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the program under the plan, with no more memory than the card has."""
    from pytracer.analysis.facts import devices, usage
    from pytracer.data.recorded import load
    from pytracer.reading import verify

    limit = found.room
    variables = verify.limited(found.chosen.changes.settings, limit)
    own = ["--apply", str(options.output.absolute())] if found.chosen.changes else []
    with tempfile.TemporaryDirectory(prefix="pytracer-") as folder:
        file = Path(folder) / "fit.pytrace"
        command = [sys.executable, "-m", "pytracer", "run", *own, "-o", str(file), "--"]
        done = subprocess.run(
            [*command, *options.program], env={**os.environ, **variables}, stdout=2
        )
        if not file.exists():
            return {"code": done.returncode, "recorded": False}
        trace = load(file)
    device = usage.main_device(trace)
    return {
        "code": done.returncode,
        "recorded": True,
        "out_of_memory": verify.ran_out(trace),
        "peak": usage.peak(trace, device).bytes,
        "reserved": devices.counted(trace, device, "reserved_bytes.peak"),
        "limit": limit,
    }


_CLOSE = 0.01  # of the promised peak


def _print_ran(found: Any, ran: dict[str, Any], screen: Any, *, as_json: bool) -> int:
    from pytracer.basics.units import size_text

    if not ran["recorded"] or (ran["code"] and not ran["out_of_memory"]):
        raise errors.CaptureError(f"the program ended with exit code {ran['code']} under the plan")
    promised = found.chosen.peak
    figures = f"peak {size_text(promised)} promised, {size_text(ran['peak'])} measured"
    fitted = not ran["out_of_memory"]
    close = abs(ran["peak"] - promised) <= _CLOSE * promised
    if not fitted:
        text = f"it did not fit: memory ran out below {size_text(ran['limit'])}; {figures}"
    elif not close:
        text = f"it ran, but not as promised: {figures}"
    else:
        text = f"it ran, and fits: {figures}"
    if not as_json:
        print("\n".join(["", *screen.paragraph("ran", text)]))
    if not fitted:
        return errors.BudgetExceeded.exit_code
    return 0 if close else errors.PytracerError.exit_code
