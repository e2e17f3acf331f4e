"""`pytracer run`: records a program without a change to it."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pytracer import errors
from pytracer.cli import autostart, imagine, output
from pytracer.cli.command import Command


class Run(Command):
    """Run a script or module and record its memory.

    Runs a script as Python would, with its arguments, and records its memory:

      pytracer run train.py --lr 0.1              5 steps, in train.pytrace
                                                  (the next in train.1.pytrace)
      pytracer run -o run.pytrace -m my.training  a module, as python -m
      pytracer run --steps 50 --stacks train.py   more steps, and Python lines
      torchrun --nproc-per-node 8 -m pytracer run train.py      one file per rank
      accelerate launch -m pytracer run train.py

    A step ends at optimizer.step(), or at the last one if several optimizers take
    turns. The first steps are written to the file as they happen, so a killed
    process leaves a file. Later steps are watched, 20 at a time, and not kept. If
    an allocation fails then, pytracer explains it and saves those steps, and it
    names a step with a higher peak than the first ones. --no-watch stops tracing
    after the first steps. A program without steps is recorded to its end. A program
    without tensors leaves no file.

    Options for pytracer come before the script; options after it are the script's
    own. Its exit code, signals and tracebacks stay as they are without pytracer.
    Under a launcher only rank 0 prints.
    """

    name = "run"
    parser_options: ClassVar[Mapping[str, Any]] = {
        "usage": "pytracer run [options] (SCRIPT | -m MODULE) [arguments]",
        "allow_abbrev": False,  # without_program knows the whole words only
    }

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_file(parser)
        _add_window(parser)
        _add_changes(parser)
        _add_recording(parser)
        _add_job(parser)

    def run(self, options: argparse.Namespace) -> int:
        """Runs the program. Its exceptions pass through, as they do without pytracer."""
        program: list[str] = options.program
        from pytracer import runner

        if options.live:
            return _run_live(options, program)
        steps = _FIRST_STEPS if options.steps == _UNSAID else options.steps
        as_module = program[:1] == ["-m"]
        words = program[1:] if as_module else program
        if not words:
            output.tell(
                "pytracer: run needs a script: pytracer run train.py, or see pytracer run -h"
            )
            return errors.UsageError.exit_code
        plan = runner.Plan(
            program=tuple(words),
            as_module=as_module,
            output=options.output,
            force=options.force,
            skip=sum(options.schedule[:2]) if options.schedule else 0,
            steps=options.schedule[2] if options.schedule else steps,
            watch=not options.no_watch,
            devices=(options.device,) if options.device else (),
            checkpoint=_names(options.checkpoint),
            offload=_names(options.offload),
            ranks=options.ranks,
            max_size=options.max_size,
            options={
                "stacks": options.stacks,
                "detail": options.detail,
                "saved_tensors": options.saved_tensors,
                "anonymous": options.anonymous,
            },
        )
        prepared: Callable[[], int]
        try:
            tell = Teller(options.json, options.force, stop=options.stop, digests=options.digests)
            prepared = runner.prepare(plan, tell)
        except errors.PytracerError as error:
            output.tell(f"pytracer: {output.in_words(error)}")
            return error.exit_code
        _record_children_too(plan, options)
        return prepared()


def _record_children_too(plan: Any, options: argparse.Namespace) -> None:
    """Passes the same options on to the ranks that the program may start itself, as Lightning does.

    A rank that a launcher started has no ranks below it: its processes are helpers.
    """
    from pytracer import environment

    if environment.world_size() > 1 or plan.checkpoint or plan.offload or options.stop:
        return
    settings = {
        "path": plan.output.absolute() if plan.output else None,
        "force": plan.force,
        "steps": plan.steps if plan.steps is not None else "all",
        "skip": plan.skip,
        "watch": plan.watch,
        "device": options.device,
        "ranks": plan.ranks,
        "max_size": plan.max_size,
        "digests": options.digests.absolute() if options.digests else None,
        **plan.options,
    }
    given = {key: value for key, value in settings.items() if value is not None and value != ()}
    if value := autostart.for_children(given):
        os.environ[autostart.NAME] = value


def _add_file(parser: argparse.ArgumentParser) -> None:
    """The file to write."""
    parser.add_argument(
        "-o", "--output", type=Path, help="default: SCRIPT.pytrace, or SCRIPT.1.pytrace, ..."
    )
    parser.add_argument("-f", "--force", action="store_true", help="overwrite the output file")


def _add_job(parser: argparse.ArgumentParser) -> None:
    """What is for a rank of a job."""
    parser.add_argument(
        "--ranks",
        type=ranks,
        default=(),
        metavar="LIST",
        help="record only these ranks of a job, say 0,8-15; default: all",
    )
    parser.add_argument(
        "--max-size",
        type=output.size,
        metavar="SIZE",
        help="the most bytes of a rank's file, about; default: 250 MB. Later events are counted",
    )
    parser.add_argument(
        "--digests",
        type=Path,
        metavar="FOLDER",
        help="each rank also writes its digest there; ask them with pytracer query FOLDER",
    )


def _add_window(parser: argparse.ArgumentParser) -> None:
    """The steps to keep, and the time after them."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--steps",
        type=_steps,
        default=_UNSAID,
        metavar="N",
        help='steps to keep (default 5; or "all")',
    )
    which.add_argument(
        "--schedule",
        type=_schedule,
        metavar="WAIT,WARMUP,ACTIVE",
        help="choose the steps to keep, counted as in torch.profiler.schedule",
    )
    parser.add_argument(
        "--no-watch", action="store_true", help="do not trace the steps after the kept ones"
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="record every step, and show it on this terminal while the program runs",
    )
    parser.add_argument(
        "--stop", action="store_true", help="end the program after the steps to keep"
    )


def _add_changes(parser: argparse.ArgumentParser) -> None:
    """Changes to try on the program."""
    parser.add_argument(
        "--checkpoint",
        metavar="NAMES",
        default="",
        help="checkpoint these modules (h.0,h.1), to try a plan without changing the program",
    )
    parser.add_argument(
        "--offload",
        metavar="NAMES",
        default="",
        help="offload the activations of these modules to the host, likewise",
    )


def _add_recording(parser: argparse.ArgumentParser) -> None:
    """What is recorded, and the other outputs."""
    parser.add_argument(
        "--stacks", action="store_true", help="also record the Python line of everything"
    )
    parser.add_argument(
        "--detail",
        choices=("op", "category"),
        default="op",
        help="category: no operators, at a fraction of the cost (default: op)",
    )
    parser.add_argument(
        "--saved-tensors",
        choices=("auto", "hooks"),
        default="auto",
        help="hooks: see each tensor at the moment autograd saves it; auto reads the "
        "graph (default: auto)",
    )
    output.add_anonymous(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: both, if there is CUDA")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the summary as JSON to this file"
    )


_UNSAID = -1
_FIRST_STEPS = 5


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def ranks(text: str) -> tuple[int, ...]:
    """The ranks in "0,8-15"."""
    if not re.fullmatch(r"\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*", text):
        raise argparse.ArgumentTypeError(f"{text} is no list of ranks, as in 0,8-15")
    ends = (part.partition("-") for part in text.split(","))
    return tuple(
        rank for first, _, last in ends for rank in range(int(first), int(last or first) + 1)
    )


def _steps(text: str) -> int | None:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f'{text} is neither a number of steps nor "all"')
    return None if text == "all" else output.positive(text)


def _schedule(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) if part.isdecimal() else -1 for part in text.split(","))
    if len(numbers) != 3 or min(numbers) < 0 or numbers[2] < 1:
        raise argparse.ArgumentTypeError(f"{text} is not WAIT,WARMUP,ACTIVE, say 1,1,3")
    return numbers


_TAKE_A_VALUE = {
    "run": {"-o", "--output", "--steps", "--schedule", "--detail", "--saved-tensors"}
    | {"--device", "--json", "--checkpoint", "--offload", "--ranks", "--max-size", "--digests"},
    "imagine": imagine.TAKE_A_VALUE,
}


# What deepspeed's launcher puts in front of all arguments, for the training program to read.
_LOCAL_RANK = re.compile(r"--local[_-]rank=\d+")


def without_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command's own options from the program and the program's options.

    A program that is a module begins with "-m". Other commands have a program after "--verify --".
    """
    given = list(arguments)
    if given and _LOCAL_RANK.fullmatch(given[0]):
        own, program = without_program(given[1:])
        at = 2 if program[:1] == ["-m"] else 1
        return own, [*program[:at], given[0], *program[at:]]
    if given and given[0] not in _TAKE_A_VALUE and "--verify" in given and "--" in given:
        at = given.index("--")
        return given[:at], given[at + 1 :]
    if not given or given[0] not in _TAKE_A_VALUE:
        return given, []
    take_a_value = _TAKE_A_VALUE[given[0]]
    at = 1
    while at < len(given):
        if given[at] == "--":
            return given[:at], given[at + 1 :]
        if given[at] == "-m" or not given[at].startswith("-"):
            return given[:at], given[at:]
        at += 2 if given[at] in take_a_value else 1
    return given, []


def _run_live(options: argparse.Namespace, program: list[str]) -> int:
    """Runs the program in a process of its own, which keeps its signals, and watches it from here."""
    from pytracer import environment, runner
    from pytracer.cli import watch

    as_module = program[:1] == ["-m"]
    words = tuple(program[1:] if as_module else program)
    try:
        if not words:
            raise errors.UsageError("run needs a script: pytracer run --live train.py")
        if environment.world_size() > 1:
            raise errors.UsageError(
                "--live is for a single process; run without it, and in another terminal: "
                "pytracer watch train.rank0.pytrace"
            )
        plan = runner.Plan(words, as_module, output=options.output, force=options.force)
        path = plan.file()
        own = _own_options(options, path)
        return watch.run_live([*own, *program], path)
    except errors.PytracerError as error:
        output.tell(f"pytracer: {output.in_words(error)}")
        return error.exit_code


def _own_options(options: argparse.Namespace, path: Path) -> list[str]:
    """The options of the same `run` without --live, that writes to this file."""
    own = ["-o", str(path)]
    if options.schedule:
        own += ["--schedule", ",".join(map(str, options.schedule))]
    else:  # a watched recording needs all steps
        own += ["--steps", "all" if options.steps in (None, _UNSAID) else str(options.steps)]
    own += ["--detail", options.detail, "--saved-tensors", options.saved_tensors]
    flags = {"force": "-f", "no_watch": "--no-watch", "stacks": "--stacks", "stop": "--stop"}
    own += [flag for name, flag in flags.items() if getattr(options, name)]
    own += ["--anonymous"] if options.anonymous else []
    own += ["--device", options.device] if options.device else []
    own += ["--checkpoint", options.checkpoint] if options.checkpoint else []
    own += ["--offload", options.offload] if options.offload else []
    own += ["--ranks", ",".join(map(str, options.ranks))] if options.ranks else []
    own += ["--max-size", str(options.max_size)] if options.max_size else []
    own += ["--digests", str(options.digests)] if options.digests else []
    return [*own, *(["--json", str(options.json)] if options.json else [])]


class Teller:
    """Prints the messages of `run`. Only rank 0 prints, but every rank reports its failure."""

    def __init__(
        self,
        json_file: Path | None,
        force: bool,
        every: str = "--steps all",
        *,
        stop: bool = False,
        digests: Path | None = None,
    ) -> None:
        """Prints nothing yet.

        Args:
            json_file: a file for the summary.
            force: whether to overwrite it.
            every: the option that records every step.
            stop: whether to end the program after the steps to keep.
            digests: a folder for the digest of each rank.
        """
        from pytracer import environment
        from pytracer.files import refuse_to_overwrite

        self.rank, self._every, self._stop = environment.rank(), every, stop
        # The program may change its folder.
        self._json = json_file.absolute() if json_file is not None else None
        self._digests = digests.absolute() if digests is not None else None
        self._folders = [*filter(None, sys.path), str(Path(__file__).parents[2])]
        self._beside: subprocess.Popen[bytes] | None = None
        self._digest: subprocess.Popen[bytes] | None = None
        self._later: Callable[[], None] = lambda: None
        if self.rank == 0 and json_file is not None:
            refuse_to_overwrite(json_file, overwrite=force)

    def line(self, text: str) -> None:
        """Prints one line."""
        if self.rank == 0:
            output.tell(f"pytracer: {text}")

    def recorded(self, traced: Any, path: Path, file: Path, which: str) -> None:
        """Shows the table and the next commands. With `--stop` the program ends here."""
        caption = f"{which.capitalize()} ({self._every}: every step):\n" if which else ""
        shown = Shown(str(path), str(file), caption, str(self._json or ""))
        if self._digests is not None:
            self._digest = self._beside_program(_WRITE_DIGEST, (str(file), str(self._digests)))
        if self.rank == 0 and which and not self._stop:
            self._show_beside(traced, shown, which)
        elif self.rank == 0:
            with output.patience("analysing"):
                show(traced, shown)
        if self._stop and which:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            os._exit(0)

    def finish(self) -> None:
        """Waits until the table is shown, even if the program was short."""
        later, self._later = self._later, lambda: None
        later()
        for process in (self._beside, self._digest):
            if process is not None:
                process.wait()

    def _show_beside(self, traced: Any, shown: "Shown", which: str) -> None:
        """Shows the table from another process, because the program is in the middle of a step.

        A thread would take the GIL from the program at each operator.
        """
        self.line(f"recorded {which}; analysing ...")
        self._beside = self._beside_program(_SHOW_FILE, tuple(shown))
        if self._beside is None:
            self._later = partial(show, traced, shown)

    def _beside_program(
        self, code: str, fields: tuple[str, ...]
    ) -> "subprocess.Popen[bytes] | None":
        """Starts a process beside the program's; None if there is no stderr, or no memory for it."""
        try:
            return subprocess.Popen(
                [sys.executable, "-c", code.format(folders=self._folders, fields=fields)],
                env={name: text for name, text in os.environ.items() if name != autostart.NAME},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=sys.stderr.fileno(),
                start_new_session=True,  # Ctrl-C is meant for the program
            )
        except (AttributeError, OSError, ValueError):
            return None

    def page(self, text: str) -> None:
        """Prints a page about a failure. Ranks other than 0 print only its last line."""
        if self.rank == 0:
            output.tell(f"\n{text}")
        else:
            last = text.splitlines()[-1]
            output.tell(f"pytracer: rank {self.rank}: {' '.join(last.split())}")


class Shown(NamedTuple):
    """A recorded file, as it is shown."""

    name: str  # the path as the user wrote it
    file: str  # the absolute path, because the program may change its folder
    caption: str
    json: str  # a file to write, or ""


# Does not import from the program's folder, even if the program changed sys.path.
_SHOW_FILE = """
import sys
sys.path[:] = {folders!r}
from pytracer.cli import run
run.show_file({fields!r})
"""
_WRITE_DIGEST = _SHOW_FILE.replace("show_file", "write_digest")


def show_file(fields: Sequence[str]) -> None:
    """Shows a file from a process of its own, at low priority. `fields` are those of `Shown`."""
    from pytracer import reading

    os.nice(10)
    output.ready_streams()
    shown = Shown(*fields)
    try:
        show(reading.read(Path(shown.file)), shown)
    except errors.PytracerError as problem:  # the program may have removed the file
        output.tell(f"pytracer: {problem}")


def write_digest(fields: Sequence[str]) -> None:
    """Writes the digest of a file into a folder of digests, from a process of its own."""
    from pytracer.ranks import dataset, folder

    os.nice(10)
    output.ready_streams()
    file, target = fields
    try:
        dataset.write([folder.digest_of(Path(file))], target, overwrite=True)
    except errors.PytracerError as problem:
        output.tell(f"pytracer: no digest: {problem}")


def _other_ranks(name: str, ranks: int) -> str:
    """The lines about the files of the other ranks, if there are any."""
    start, rank0, end = name.rpartition(".rank0")
    others = range(1, ranks) if rank0 else range(0)
    if not others:
        return ""
    first, last = (f"{start}.rank{rank}{end}" for rank in (others[0], others[-1]))
    files = first if len(others) == 1 else f"{first} to {last}"
    return (
        f"\nThe other ranks write {files}. Compare all with:\n"
        f"  pytracer summary {shlex.quote(f'{start}.rank*{end}')}"
    )


def show(traced: Any, shown: Shown) -> None:
    """Prints the table and the next commands in one write, so the program cannot print in between."""
    from pytracer import meta
    from pytracer.analysis.facts import phases
    from pytracer.export.table import wants_color

    table = traced.table(color=sys.stderr is not None and wants_color(sys.stderr))
    if len(traced.data.events.ticks) and not len(phases.timeline(traced.data).step_ends):
        table += "\n\nNo optimizer step was seen, so everything was recorded to the end."
    file = shlex.quote(shown.name)
    others = _other_ranks(shown.name, meta.of(traced.data).world_size)
    output.tell(
        f"\n{shown.caption}{table}\n\nWritten to {shown.name}. Look again with:\n"
        f"  pytracer summary {file}\n"
        f"  pytracer export {file}    a timeline for Perfetto{others}"
    )
    try:
        json_file = Path(shown.json) if shown.json else None
        output.write_json(json_file, output.summary_document(traced) if json_file else {})
    except errors.CannotWrite as problem:  # the training goes on
        output.tell(f"pytracer: {problem}")
