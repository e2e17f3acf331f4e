"""`pytracer check`: compares a trace with a budget."""

import argparse
import shlex
from pathlib import Path
from typing import Any, ClassVar

from pytracer import errors
from pytracer.cli import baseline, jobs, output, progress
from pytracer.cli.command import Command


class Check(Command):
    """Compare a saved trace with a budget; exit code 3 if it is exceeded.

    Sizes are written 40GiB (of 1024), 1.5GB (of 1000), 5000B.

      pytracer check train.pytrace --max-peak 20GiB
      pytracer check train.pytrace --max activations=10GiB --max-growth 0
      pytracer check train.pytrace --baseline main.pytrace --max-increase 5%

    A program is imagined, and compared with a file of `pytracer baseline`. Then
    options for pytracer come before the script, and --baseline, --tolerance,
    --markdown and --json may also follow it.

      pytracer check train.py --baseline memory.json
      pytracer check --baseline memory.json --tolerance 1MiB train.py --epochs 1
    """

    name = "check"
    may_run_a_program: ClassVar[bool] = True
    may_follow: ClassVar[tuple[str, ...]] = ("--baseline", "--tolerance", "--markdown", "--json")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        output.add_trace(parser)
        parser.add_argument("--max-peak", metavar="SIZE", help="limit for all memory at once")
        parser.add_argument(
            "--max",
            action="append",
            default=[],
            metavar="CATEGORY=SIZE",
            help="limit for one category at its own peak, say activations=10GiB; may be repeated",
        )
        parser.add_argument(
            "--max-growth", metavar="SIZE", help="limit for growth per step, after the first step"
        )
        parser.add_argument(
            "--baseline",
            type=Path,
            metavar="FILE",
            help="show the growth since this trace; of a program, the file to compare with",
        )
        parser.add_argument(
            "--max-increase",
            metavar="SIZE|PERCENT",
            help="limit for the peak over the baseline's, say 5%%",
        )
        baseline.add_to_check(parser)
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        if baseline.is_asked(options):
            return baseline.check(options)
        return _check_trace(options)


def _check_trace(options: argparse.Namespace) -> int:
    from pytracer.analysis.answers import budgets
    from pytracer.basics.units import parse_size
    from pytracer.export import budget
    from pytracer.reading import views

    limits = _limits(options)
    options.file = output.trace_or_newest(options.file)
    if jobs.is_job(options.file):
        return jobs.check(options, limits)
    with progress.doing(f"reading {options.file}"):
        loaded = views.read(options.file)
        since = output.read(options.baseline) if options.baseline else None
        if options.max_increase is not None:
            assert since is not None
            before = since.peak.bytes
            allowed = before + output.size_or_share("--max-increase", options.max_increase, before)
            limits["peak"] = min(limits.get("peak", allowed), allowed)
        measured = budgets.measured(loaded.data, limits)
        exceeded = [row for row in measured if row.found > row.limit]
        if not exceeded:
            _require_whole(options.file, loaded)
        changed = [] if since is None else budgets.differences(loaded.data, since.data)
    if options.json:
        output.print_json(
            {
                "file": str(options.file),
                "limits": {name: parse_size(size) for name, size in limits.items()},
                "peak": loaded.peak.bytes,
                "exceeded": [vars(row) for row in exceeded],
                "differences": [vars(row) for row in changed],
            }
        )
        return errors.BudgetExceeded.exit_code if exceeded else 0
    if exceeded:
        print("\n".join(budget.exceeded_lines(exceeded)))
    else:
        print("\n".join(("Within the budget:", *budget.kept_lines(measured))))
        if "growth_per_step" in limits and (note := budget.growth_note(loaded.data)):
            print(note)
    if since is not None:
        print("\n".join(("", *budget.difference_lines(changed))))
    if not exceeded:
        return 0
    print(f"\n{loaded.table()}\n")
    grew = any(row.name == "growth_per_step" for row in exceeded)
    title = "Look closer with:"
    for command in _next_commands(options, loaded, grew=grew):
        print(f"{title:<19}pytracer {shlex.join(command)}")
        title = ""
    return errors.BudgetExceeded.exit_code


def _next_commands(options: argparse.Namespace, loaded: Any, *, grew: bool) -> list[list[str]]:
    """The commands that show more about an exceeded limit."""
    file = str(options.file)
    commands = []
    if options.baseline:
        commands.append(["diff", str(options.baseline), file])
    if grew:  # growth is of the steps after the first
        last = len(loaded.steps()) - 1
        commands.append(["diff", file, "--steps", f"1,{last}"])
    if grew or not options.baseline:
        commands.append(["report", file])
    return commands


def _require_whole(file: Path, loaded: Any) -> None:
    """Refuses an incomplete trace, because the lost events may have exceeded the budget."""
    from pytracer.data import health  # imports numpy, which `pytracer run` leaves to the program

    lost = loaded.health().index
    if any(name in health.OF_FILES for name in lost):
        raise errors.UnreadableTrace(
            f"{file} is not whole: its events are within the budget, but the missing ones may exceed "
            "it; record it again"
        )
    if "lost_alloc" in lost:
        raise errors.UnreadableTrace(
            f"{file} lacks allocations that did not fit into the recording; the others are within "
            "the budget. Record it again with path=, or with fewer steps"
        )
    if not len(loaded.data.events.ticks):
        raise errors.UnreadableTrace(
            f"{file} has no memory event, so it cannot be compared with a budget: was the model on "
            "a traced device, and did it train in this process?"
        )


def _limits(options: argparse.Namespace) -> dict[str, int | str]:
    from pytracer.basics.units import parse_size

    limits: dict[str, int | str] = {}
    if options.max_peak is not None:
        limits["peak"] = parse_size(options.max_peak)
    for text in options.max:
        name, equals, size = text.partition("=")
        if not equals:
            raise errors.UsageError(f"--max {text}: name a category, as in --max activations=10GiB")
        limits[name] = parse_size(size)
    if options.max_growth is not None:
        limits["growth_per_step"] = parse_size(options.max_growth)
    if options.max_increase is not None and options.baseline is None:
        raise errors.UsageError("--max-increase needs --baseline FILE")
    if not limits and options.max_increase is None:
        limit = "--max-peak 40GiB" if options.baseline is None else "--max-increase 5%"
        raise errors.UsageError(f"check needs a limit, such as {limit}; see check -h")
    return limits
