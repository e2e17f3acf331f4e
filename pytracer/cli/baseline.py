"""`pytracer baseline`, and `pytracer check` of a program: what a step needs, imagined and compared."""

import argparse
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pytracer import errors
from pytracer.cli import imagining, output
from pytracer.cli.command import Command


class Baseline(Command):
    """Imagine a program's memory and write it to a file, for check to compare with.

    Needs no GPU. The file has the peak and each category's own peak, to the byte,
    with module, op and line. It has a part for each torch that wrote to it.

      pytracer baseline train.py --on H100 -o memory.json
      pytracer check train.py --baseline memory.json
      pytracer baseline -o memory.json --ranks 8 -m my.training --epochs 1
      pytracer baseline -f -o memory.json train.py      writes it again

    Options for pytracer come before the script; -o, -f, --on and --json may also
    follow it.
    """

    name = "baseline"
    parser_options: ClassVar[Mapping[str, Any]] = {
        "usage": "pytracer baseline [options] (SCRIPT | -m MODULE | --hf FOLDER) [words]",
        "allow_abbrev": False,
    }
    runs_a_program: ClassVar[bool] = True
    may_follow: ClassVar[tuple[str, ...]] = ("--on", "-o", "--output", "-f", "--force", "--json")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "-o",
            "--output",
            type=Path,
            metavar="FILE",
            default=Path("memory.json"),
            help="the file to write (default: memory.json)",
        )
        parser.add_argument(
            "-f", "--force", action="store_true", help="write what the file already has again"
        )
        imagining.add_run(parser, on="the card (default: H100)")
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        from pytracer.basics import files
        from pytracer.data._native import torch_version
        from pytracer.imagined import baseline

        plan = imagining.plan(options, self.name, stacks=True)
        card = imagining.card(options.on, plan.capacity)
        path: Path = options.output
        now = baseline.of(plan, card.card.name)
        files.refuse_to_overwrite(path, overwrite=True)
        if path.exists():
            now = _with_others(path, now, overwrite=options.force)
        torch = baseline.release(torch_version())
        if torch in now.by_torch and not options.force:
            raise errors.FileIsThere(path, f"has torch {torch} already", "writes it again")
        ranks = _imagined(plan, card, options.rank)
        now.with_ranks(torch, ranks).write(path)
        _tell_written(path, card.card.name, torch, ranks, as_json=options.json)
        return 0


def _with_others(path: Path, now: Any, *, overwrite: bool) -> Any:
    """The baseline with the parts of other torches that the file has. Only -f replaces another run."""
    from pytracer.imagined import baseline

    try:
        before = baseline.read(path)
        baseline.refuse_others(before, now, path)
    except errors.PytracerError as problem:
        if overwrite:
            return now
        if isinstance(problem, errors.UnreadableTrace):
            raise errors.FileIsThere(path) from None
        raise
    return before


def _tell_written(
    path: Path, card: str, torch: str, ranks: Mapping[int, Any], *, as_json: bool
) -> None:
    from pytracer.analysis.answers.baselines import PEAK
    from pytracer.basics.units import size_text

    peaks = {rank: moments[PEAK].side.bytes for rank, moments in ranks.items()}
    if as_json:
        output.print_json({"file": str(path), "card": card, "torch": torch, "peaks": peaks})
        return
    highest = size_text(max(peaks.values()))
    of = f" (the highest of {len(peaks)} ranks)" if len(peaks) > 1 else ""
    print(f"peak {highest}{of} on {card} with torch {torch}, imagined. Written to {path}")


def _imagined(plan: Any, card: Any, ranks: str | None) -> dict[int, Any]:
    """Each rank's moments."""
    from pytracer.analysis.answers import baselines

    found: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for answer in imagining.imagine(plan, card, ranks, Path(folder)):
            trace = answer.imagined.trace
            if trace is None:
                raise errors.CannotImagine(f"cannot be imagined: {answer.imagined.problem}")
            found[answer.rank] = baselines.moments(trace.data)
    return found


# ---------------------------------------------------------------- pytracer check


def add_to_check(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `check` for a program."""
    program = parser.add_argument_group("a program instead of a trace: check train.py")
    program.add_argument(
        "--tolerance",
        metavar="SIZE|PERCENT",
        help="how far each figure may be from the baseline's, say 1MiB or 1%% of the peak (default 0)",
    )
    program.add_argument("--hf", metavar="FOLDER", help="the model's folder, without a script")
    program.add_argument(
        "--markdown", type=Path, metavar="FILE", help="also write a comment for a pull request"
    )
    imagining.add_wish(program, write=False)


def is_asked(options: argparse.Namespace) -> bool:
    """Whether `check` is to imagine a program, and not to read a trace.

    Raises:
        errors.UsageError: an option is for the other of the two.
    """
    asked = bool(options.program) or options.hf is not None
    only_trace = ("max_peak", "max", "max_growth", "max_increase", "file")
    only_program = ("tolerance", "markdown")
    for name in only_trace if asked else only_program:
        if getattr(options, name):
            flag = "FILE" if name == "file" else f"--{name.replace('_', '-')}"
            what = "a trace, and this is a program" if asked else "a program: check train.py"
            raise errors.UsageError(f"{flag} is for {what}")
    return asked


def check(options: argparse.Namespace) -> int:
    """Imagines the program again, and compares it with the baseline."""
    from pytracer.analysis.answers import baselines
    from pytracer.basics.files import refuse_to_overwrite
    from pytracer.data._native import torch_version
    from pytracer.export import baseline_text
    from pytracer.imagined import baseline

    plan = _asked(options)
    if options.baseline is None:
        raise errors.UsageError(
            "check of a program needs --baseline FILE, which pytracer baseline writes"
        )
    before = baseline.read(options.baseline)
    now = baseline.of(before.plan(plan), before.card)
    baseline.refuse_others(before, now, options.baseline)
    card = imagining.card(before.card, before.run["capacity"])
    if options.markdown is not None:
        refuse_to_overwrite(options.markdown, overwrite=True)
    torch = baseline.release(torch_version())
    old = before.under(torch, options.baseline)
    ranks = ",".join(map(str, old)) if before.run["ranks"] else None
    found = {}
    for rank, moments in _imagined(before.plan(plan), card, ranks).items():
        peak = old[rank][baselines.PEAK].side.bytes
        allowed = output.size_or_share("--tolerance", options.tolerance or "0", peak)
        found[rank] = baselines.compared(old[rank], moments, allowed)
    program = shlex.join(options.program) or options.hf
    title = _title(program, before.card, torch, found)
    if options.markdown is not None:
        several = len(found) > 1
        parts = [(f"rank {rank}" if several else "", each) for rank, each in found.items()]
        options.markdown.write_text(baseline_text.comment(title, parts), encoding="utf-8")
    is_over = any(figure.is_over for figures in found.values() for figure in figures)
    if options.json:
        by_rank = [{"rank": rank, **baseline_text.document(one)} for rank, one in found.items()]
        about = {"program": program, "card": before.card, "torch": torch, "differs": is_over}
        output.print_json({**about, "ranks": by_rank})
    else:
        _print(title, found, options, is_over=is_over)
    return errors.BudgetExceeded.exit_code if is_over else 0


def _asked(options: argparse.Namespace) -> Any:
    from pytracer.imagined import script

    as_module = options.program[:1] == ["-m"]
    words = tuple(options.program[1:] if as_module else options.program)
    model = None
    if options.hf is not None:
        if words:
            raise errors.UsageError(f"--hf needs no script, and {words[0]} is one")
        model = {"folder": str(Path(options.hf).absolute())}
    elif not words:
        raise errors.UsageError("check -m needs a module's name")
    return script.Plan(words, as_module, card="", model=model, wish=imagining.wish(options))


def _title(program: str, card: str, torch: str, found: Mapping[int, Any]) -> str:
    from pytracer.analysis.answers.baselines import PEAK
    from pytracer.export.diff import signed

    figures = [figure for each in found.values() for figure in each]
    over = [figure for figure in figures if figure.is_over]
    where = f"on {card}, torch {torch}, imagined"
    if not over:
        return f"{program} needs what the baseline says ({where})"
    change = max((f.change for f in figures if f.name == PEAK), key=abs)
    if not change:
        return f"{program} has the baseline's peak, but other parts of it ({where})"
    return f"{program} needs {signed(change)} at the peak ({where})"


def _print(
    title: str, found: Mapping[int, Any], options: argparse.Namespace, *, is_over: bool
) -> None:
    from pytracer.export import baseline_text, terminal

    screen = terminal.here()
    for rank, figures in found.items():
        name = f"rank {rank}: {title}" if len(found) > 1 else title
        print(baseline_text.render(name, figures, screen))
        if len(found) > 1:
            print()
    if is_over:
        text = f"If that is meant, write {options.baseline} again: pytracer baseline with -f"
        print("\n" + "\n".join(screen.wrap(text)))
