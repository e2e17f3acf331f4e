"""Commands that show: demo, summary, watch, diff, ledger, doctor."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.basics.units import size_text
from pytracer.basics.version import __version__
from pytracer.cli import jobs, output, progress
from pytracer.cli.command import Command

_DEMO_FILE = Path("pytracer-demo.pytrace")


class Demo(Command):
    """Trace a small transformer's training steps and show the table.

    Trains it here for a few steps, and prints the screen as for your own program:

      pytracer demo                       on the GPU if there is one
      pytracer demo --device cpu --steps 5
    """

    name = "demo"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "-o", "--output", type=Path, help=f"default: {_DEMO_FILE}, which each demo replaces"
        )
        parser.add_argument("-f", "--force", action="store_true", help="overwrite the output file")
        parser.add_argument(
            "--steps", type=output.positive, default=3, help="training steps (default 3)"
        )
        parser.add_argument(
            "--device", choices=("cpu", "cuda"), help="default: the GPU if there is one"
        )
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        import torch

        from pytracer.basics.files import refuse_to_overwrite
        from pytracer.cli.demo import run
        from pytracer.export import table, terminal

        target = options.output or _DEMO_FILE
        refuse_to_overwrite(target, overwrite=options.force or options.output is None)
        if options.device == "cuda" and not torch.cuda.is_available():
            raise errors.UsageError("--device cuda: there is no CUDA device here")

        with progress.doing("tracing"):
            traced = run(options.steps, options.device)
        written = traced.save(target, overwrite=True)
        if options.json:
            output.print_json({**output.summary_document(traced), "path": str(written)})
            return 0
        print(table.render(traced.data, terminal.here()))
        again = shlex.join(["pytracer", "summary", str(written)])
        print(f"\nWritten to {written}. Look again with:  {again}")
        return 0


class Summary(Command):
    """Show a saved trace on one screen.

    Shows the memory at the peak: by category, the modules and lines that held
    most, the bytes that the allocator adds, the duration of a step, and the best
    changes.

      pytracer summary                             the newest .pytrace here
      pytracer summary run.pytrace                 this one
      pytracer summary run.pytrace --words         and an explanation of its words
      pytracer summary run.pytrace --advice        every change that helps
      pytracer summary run.pytrace --by module,op  who holds memory
      pytracer summary snapshot.pickle             torch's own memory history
      pytracer summary run/                        all ranks of a job, compared
      pytracer summary run.always                  every step since it began
      pytracer summary 'train.rank*.always'        the same of all ranks
      pytracer summary run.pytrace --json | jq .peak.bytes
    """

    name = "summary"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        output.add_trace(
            parser, "a .pytrace file, a memory snapshot of torch, or a folder with a job's ranks"
        )
        jobs.add_engine(parser)
        parser.add_argument("--words", action="store_true", help="explain the words on the screen")
        parser.add_argument(
            "--advice",
            action="store_true",
            help="instead of the screen, every change that lowers the peak, with what it saves",
        )
        parser.add_argument(
            "--by",
            metavar="KEY,...",
            help="who holds memory, instead of the screen: by module, op, line, phase, category, "
            "role, dtype, ... or by several (module,op)",
        )
        parser.add_argument(
            "--at",
            choices=("peak", "end"),
            default="peak",
            help="the moment of --by (default peak)",
        )
        output.add_anonymous(parser)
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        from pytracer.export import advice_text, postmortem, table, terminal, words
        from pytracer.reading import history, views

        screen = terminal.here()
        if options.file is None and options.words:
            print(words.legend(terminal=screen))
            return 0
        options.file = output.trace_or_newest(options.file)
        if options.by is not None:
            return _holders(options)
        if history.is_history(options.file):
            return _history(options, screen)
        if folders := history.histories_in(options.file):
            return _histories(folders, options, screen)
        if jobs.is_job(options.file):
            return jobs.summary(options)
        with progress.doing(f"reading {options.file}"):
            loaded = views.read(options.file)
            loaded = loaded.anonymous() if options.anonymous else loaded
            if options.advice and not options.json:
                shown = advice_text.text(loaded, screen)
            else:
                shown = table.render(loaded.data, screen)
        if options.json:
            output.print_json(output.summary_document(loaded))
            return 0
        print(shown)
        if options.advice:
            return 0
        if options.words:
            print(f"\n{words.legend(table.shown_categories(loaded.peak), screen)}")
        from pytracer.data import meta

        if meta.of(loaded.data).failed:
            print(f"\n{postmortem.render(loaded.data, screen)}")
        output.note_damage(options.file, loaded)
        file = shlex.quote(str(options.file))
        print(f"\nOver time:         pytracer export {file}", file=sys.stderr)
        print(f"Against a budget:  pytracer check {file} --max-peak SIZE", file=sys.stderr)
        return 0


def _history(options: argparse.Namespace, screen: Any) -> int:
    """Every step of a program, from a recorder that was always on."""
    from pytracer.reading.history import History

    found = History(options.file)
    if options.json:
        output.print_json(found.document())
    else:
        print(found.table(screen.width, color=screen.color))
    return 0


def _histories(folders: list[Path], options: argparse.Namespace, screen: Any) -> int:
    """Recorders of a job that were always on, one for each rank."""
    from pytracer.data.history import Steps, ranks_in_short
    from pytracer.export import history_text

    ranks = [Steps(folder) for folder in folders]
    if options.json:
        output.print_json({"ranks": [vars(row) for row in ranks_in_short(ranks)]})
    else:
        print(history_text.of_ranks(ranks, screen))
    return 0


_MOST_HOLDERS = 30  # rows of `summary --by`


def _holders(options: argparse.Namespace) -> int:
    """Who holds memory, by one or several keys, the largest first."""
    from pytracer.export import terminal

    keys = list(dict.fromkeys(options.by.split(",")))
    loaded = output.read(options.file, anonymous=options.anonymous)
    with progress.doing("finding who holds memory"):
        table = loaded.by(keys, at=options.at).reset_index()
    if options.json:
        rows = json.loads(table.to_json(orient="records"))
        output.print_json({"by": keys, "at": options.at, "holders": rows})
        return 0
    total, screen = int(table["bytes"].sum()), terminal.here()
    print(f"{size_text(total)} at the {options.at}\n")
    print(f"{'bytes':>10}{'share':>8}{'blocks':>8}  {', '.join(keys)}")
    for row in table.head(_MOST_HOLDERS).itertuples(index=False):
        names = [
            str(name) if name == name and name is not None else "-" for name in row[: len(keys)]
        ]
        share = row.bytes / total if total else 0.0
        head = f"{size_text(row.bytes):>10}{share:>8.1%}{row.allocations:>8,}  "
        print(screen.one_line(head, " \N{MIDDLE DOT} ".join(names)))
    rest = table[_MOST_HOLDERS:]
    if len(rest):
        print(f"{size_text(int(rest['bytes'].sum())):>10}  in {len(rest):,} more; --json lists all")
    if "line" in keys and table["line"].isna().all():
        output.tell("\nNo line was recorded: pytracer run --stacks records them.")
    return 0


class Watch(Command):
    """Show a recording while it runs.

    Shows a trace that is still being written: categories now and at the peak,
    steps, growth, modules, lines, the device's other users. q leaves. If the
    output is no terminal, or TERM is dumb, it prints a line for each step.

      pytracer watch train.pytrace                from another terminal
      pytracer watch train.pytrace | tee steps.txt
      pytracer watch train.always                 every step since it began
      pytracer watch 'train.rank*.always'         all ranks: which departs or grows
    """

    name = "watch"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        output.add_trace(parser, "a .pytrace file or .always folder that a program is writing")

    def run(self, options: argparse.Namespace) -> int:
        from pytracer.cli import watch
        from pytracer.data import history

        file = output.trace_or_newest(options.file)
        folders = [file] if history.is_history(file) else history.histories_in(file)
        if folders:
            watch.watch_histories(folders)
        else:
            watch.watch(file)
        return 0


class Diff(Command):
    """Show what changed between two traces, or two steps of one.

    The largest change comes first. Rows that only moved to another line or layer
    are counted, and not listed.

      pytracer diff before.pytrace after.pytrace
      pytracer diff before.pytrace after.pytrace --by module
      pytracer diff train.pytrace --steps 2,18       what grew between two steps
      pytracer diff run-monday/ run-friday/          two jobs of many ranks
    """

    name = "diff"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "before",
            type=Path,
            nargs="?",
            help="a .pytrace file, a memory snapshot of torch, or a folder of ranks (for --steps "
            "the default is the newest .pytrace here)",
        )
        parser.add_argument("after", type=Path, nargs="?", help="the other one (default: the same)")
        parser.add_argument(
            "--by",
            default="category,module,op,line,phase",
            metavar="KEY,...",
            help="keys that distinguish rows (default: category,module,op,line,phase); also "
            "role, name, shape, dtype, step, pool, free_phase, mesh_dim",
        )
        parser.add_argument("--at", choices=("peak", "end"), default="peak", help="default: peak")
        parser.add_argument(
            "--steps", type=_two_steps, metavar="A,B", help="a step of each, from 0: 1,3"
        )
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        if options.before is None and options.steps is not None:
            options.before = output.trace_or_newest(None)
        if jobs.is_job(options.before) or jobs.is_job(options.after):
            options.before, options.after = jobs.diff(options)
        if options.before is None or (options.after is None and options.steps is None):
            raise errors.UsageError("a diff needs a second trace, or --steps 1,3 of this one")
        if options.steps is not None and options.at != "peak":
            raise errors.UsageError(f"--at {options.at}: steps are compared at their peaks")
        from pytracer.analysis.answers import diff
        from pytracer.export import terminal
        from pytracer.export.diff import render

        after_path = options.after or options.before
        before = output.read(options.before)
        after = output.read(options.after) if options.after else before
        names = str(options.before), str(after_path)
        with progress.doing("comparing"):
            changes = diff.diff(
                before.data, after.data, options.by.split(","), options.at, options.steps, names
            )
        if options.json:
            output.print_json(
                {
                    "keys": changes.keys,
                    "before": vars(changes.before),
                    "after": vars(changes.after),
                    "rows": [{**vars(row), "kind": row.kind} for row in changes.rows],
                }
            )
            return 0
        print(render(changes, names, terminal.here()))
        return 0


def _two_steps(text: str) -> tuple[int, int]:
    first, comma, second = text.partition(",")
    if not (comma and first.isdecimal() and second.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text} is not two steps, as in 1,3")
    return int(first), int(second)


class Ledger(Command):
    """Show a device's bytes row by row, from tensors to nvidia-smi's figure.

    Adds the context of CUDA, other processes and the driver's reserve to what
    torch holds. The residual is the part that nobody explains.

      pytracer ledger                     the GPUs as they are now; where none can
                                          be read, the newest .pytrace here
      pytracer ledger train.pytrace       at the end of a recording
      pytracer ledger train.pytrace --at peak --probe
    """

    name = "ledger"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "file",
            type=Path,
            nargs="?",
            help="a .pytrace file or a memory snapshot of torch (default: the GPUs as they are now; "
            "where none can be read, the newest .pytrace here)",
        )
        parser.add_argument("--at", choices=("peak", "end"), default="end", help="default: end")
        parser.add_argument("--device", help="default: the one that the program trained on")
        parser.add_argument(
            "--probe", action="store_true", help="measure the size of a bare CUDA context here"
        )
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        if options.file is None:
            from pytracer.basics import driver

            nvml = driver.open_nvml()
            if not isinstance(nvml, str):
                return _ledger_now(options, nvml)
            options.file = _newest_instead(nvml)
        from pytracer.analysis.allocator import fragmentation, ledger
        from pytracer.export import terminal
        from pytracer.export.ledger_text import render

        trace = output.read(options.file).data
        with progress.doing("adding up"):
            books = ledger.ledger(trace, options.at, options.device)
            layout = fragmentation.layout(trace, options.at, books.device)
        probed = _probe() if options.probe else None
        if options.json:
            document = {
                **vars(books),
                "rows": [vars(row) for row in books.rows],
                "closes": books.closes,
                "fragmentation": fragmentation.summary(layout),
            }
            output.print_json({**document, "probe": probed} if probed else document)
            return 0
        print(f"Ledger of {books.device} at the {books.at}")
        print(render(books, layout, terminal.here()))
        if probed:
            _print_probe(probed)
        return 0


def _newest_instead(problem: str) -> Path:
    """The newest trace here, because no device can be read."""
    try:
        newest = output.trace_or_newest(None)
    except errors.UnreadableTrace as none:
        raise errors.CaptureError(f"the devices cannot be read: {problem}. And {none}") from None
    output.tell(f"pytracer: it is shown because the devices cannot be read: {problem}")
    return newest


def _ledger_now(options: argparse.Namespace, nvml: Any) -> int:
    """Prints the memory of every device that NVML shows, by process."""
    from pytracer.basics import driver
    from pytracer.export.ledger_text import render_now

    gpus = driver.read_gpus(nvml, driver.all_uuids(nvml))
    driver.name_processes(nvml, gpus)
    probed = _probe() if options.probe else None
    if options.json:
        output.print_json({"gpus": gpus, **({"probe": probed} if probed else {})})
        return 0
    print(render_now(gpus))
    if probed:
        _print_probe(probed)
    else:
        print("The size of a bare CUDA context here:  pytracer ledger --probe")
    return 0


def _probe() -> dict[str, Any]:
    from pytracer.capture import probe

    return probe.measure()


def _print_probe(probed: dict[str, Any]) -> None:
    from pytracer.export.ledger_text import render_probe

    print(f"\n{render_probe(probed)}")


def _calibrate(*, as_json: bool) -> int:
    from pytracer.basics.units import size_text
    from pytracer.imagined import calibration

    with progress.doing("measuring the GPU"):
        card = calibration.measure()
    if as_json:
        output.print_json({"card": vars(card), "file": str(calibration.file())})
        return 0
    print(
        f"{card.title}: {size_text(card.capacity)} of memory, {size_text(card.beside)} beside torch's "
        f"allocator, {size_text(card.cublas_workspace)} of workspace for cuBLAS"
    )
    print(f"kept in {calibration.file()}, for pytracer imagine --on {card.title!r}")
    return 0


class Doctor(Command):
    """Check what works here, and what to do about the rest.

    Records small programs whose answer is known, and compares:

      pytracer doctor                     each line that fails says what to do
      pytracer doctor --calibrate         and measure this GPU for pytracer imagine
    """

    name = "doctor"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--calibrate",
            action="store_true",
            help="measure the GPU here, and keep it for pytracer imagine",
        )
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        if options.calibrate:
            return _calibrate(as_json=options.json)
        from pytracer.cli import doctor
        from pytracer.export import terminal

        def tell(name: str, text: str) -> None:
            print("\n".join(screen.wrap(text, f"{name:<20} ", " " * 21)))

        screen = terminal.here()
        machine = {"pytracer": __version__, **doctor.machine()}
        if not options.json:
            for name, value in machine.items():
                shown = ", ".join(value) if isinstance(value, list) else value
                tell(name, shown or "none")
        results = []
        for check in doctor.checks():
            results.append(vars(check))
            if not options.json:
                tell(check.name, f"{check.verdict:7} {check.detail}")
        failed = any(check["verdict"] == "failed" for check in results)
        if options.json:
            output.print_json({**machine, "checks": results})
        elif not failed:
            print("\nTry it:  pytracer demo", file=sys.stderr)
        return 1 if failed else 0
