"""The command line: the only place that prints, and the only one that decides how to exit.

What a program reads goes to stdout (`--json`, one document with a version); what a person reads
is plain text. Errors are one line on stderr, and the exit code says which kind they are.
"""

import argparse
import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.version import __version__

JSON_VERSION = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    parser = _parser()
    arguments, program = _without_program(sys.argv[1:] if arguments is None else arguments)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        words = " ".join(unknown)
        hint = "; the script's own options go after the script" if options.command == "run" else ""
        parser.error(f"unrecognized arguments: {words}{hint}")
    if options.command is None:
        parser.print_help()
        return errors.UsageError.exit_code
    if options.command == "run":
        return _run(options, program)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except errors.PytracerError as error:
        print(f"pytracer: {_in_words(error)}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # `pytracer ... | head`: the reader has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pytracer",
        description="Where a training step's memory went, to the byte.",
        epilog="In your own code: `from pytracer import trace`, then `with trace():` around a step.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"pytracer {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="trace a small transformer's training steps and show the table"
    )
    demo.add_argument("-o", "--output", type=Path, default=Path("pytracer-demo.pytrace"))
    demo.add_argument("-f", "--force", action="store_true", help="overwrite the output file")
    demo.add_argument("--steps", type=_positive, default=3, help="training steps (default 3)")
    demo.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")
    demo.add_argument("--json", action="store_true", help="one JSON document on stdout")
    demo.set_defaults(run=_demo)

    summary = commands.add_parser("summary", help="show a saved trace on one screen")
    summary.add_argument("file", type=Path, help="a .pytrace file or a memory snapshot of torch")
    summary.add_argument("--json", action="store_true", help="one JSON document on stdout")
    summary.set_defaults(run=_summary)

    _add_run(commands)
    _add_check(commands)

    diff = commands.add_parser(
        "diff", help="what grew and what is new: two traces, or two steps of one"
    )
    diff.add_argument("before", type=Path, help="a .pytrace file or a memory snapshot of torch")
    diff.add_argument("after", type=Path, nargs="?", help="the other one (default: the same)")
    diff.add_argument(
        "--by",
        default="category,module,op,line,phase",
        help="what to tell apart (default: category,module,op,line,phase)",
    )
    diff.add_argument("--at", choices=("peak", "end"), default="peak", help="default: peak")
    diff.add_argument("--steps", type=_two_steps, help="a step of each, from 0: 1,3")
    diff.add_argument("--json", action="store_true", help="one JSON document on stdout")
    diff.set_defaults(run=_diff)

    export = commands.add_parser(
        "export", help="a saved trace for a viewer, a notebook or a browser"
    )
    export.add_argument("file", type=Path, help="a .pytrace file or a memory snapshot of torch")
    export.add_argument(
        "-o", "--output", help="the file, or for parquet the folder (default: beside the trace)"
    )
    export.add_argument(
        "--format",
        choices=tuple(_SUFFIXES),
        help="chrome (https://ui.perfetto.dev), snapshot (https://pytorch.org/memory_viz), html "
        "or parquet; by default what the output's suffix says, or chrome",
    )
    export.add_argument("-f", "--force", action="store_true", help="overwrite the output file")
    export.add_argument(
        "--max-events", type=_positive, help="keep the largest and longest of a large trace"
    )
    export.add_argument("--json", action="store_true", help="one JSON document on stdout")
    export.set_defaults(run=_export)

    ledger = commands.add_parser(
        "ledger", help="a device's bytes row by row, from tensors to what nvidia-smi shows"
    )
    ledger.add_argument(
        "file", type=Path, nargs="?", help="a .pytrace file (default: the devices as they are now)"
    )
    ledger.add_argument("--at", choices=("peak", "end"), default="end", help="default: end")
    ledger.add_argument("--device", help="default: the one that the program trained on")
    ledger.add_argument(
        "--probe", action="store_true", help="measure what a bare CUDA context costs here"
    )
    ledger.add_argument("--json", action="store_true", help="one JSON document on stdout")
    ledger.set_defaults(run=_ledger)

    gemm = commands.add_parser(
        "gemm", help="which matrix shapes this device likes, and what padding yours would gain"
    )
    _add_gemm_arguments(gemm)
    gemm.set_defaults(run=_gemm)

    cost = commands.add_parser(
        "cost", help="what each part cost, forward and backward, beside the textbook's ratios"
    )
    cost.add_argument(
        "file", type=Path, nargs="?", help="a .pytrace file recorded with trace(cost=True)"
    )
    cost.add_argument("--by", choices=("class", "module", "op"), help="default: class")
    cost.add_argument("--each", action="store_true", help="by module, a row for every layer")
    cost.add_argument(
        "--measure-peaks", action="store_true", help="measure what this device can do, and keep it"
    )
    cost.add_argument("--json", action="store_true", help="one JSON document on stdout")
    cost.set_defaults(run=_cost)

    confirm = commands.add_parser(
        "confirm", help="published claims about training memory, measured again on this machine"
    )
    _add_confirm_arguments(confirm)
    confirm.set_defaults(run=_confirm)

    doctor = commands.add_parser(
        "doctor", help="what works here, what does not, and what to do about it"
    )
    doctor.add_argument("--json", action="store_true", help="one JSON document on stdout")
    doctor.set_defaults(run=_doctor)
    return parser


# What each export is called, and which suffixes stand for it; the first is its own.
_SUFFIXES = {
    "chrome": (".json.gz", ".json"),
    "snapshot": (".pickle", ".pkl"),
    "html": (".html", ".htm"),
    "parquet": (".parquet", "/"),
}


def _two_steps(text: str) -> tuple[int, int]:
    first, comma, second = text.partition(",")
    if not (comma and first.isdecimal() and second.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text} is not two steps, as in 1,3")
    return int(first), int(second)


def _add_gemm_arguments(parser: argparse.ArgumentParser) -> None:
    from pytracer.gemm import arguments

    arguments.add(parser)


def _add_confirm_arguments(parser: argparse.ArgumentParser) -> None:
    from pytracer.claims import arguments

    arguments.add(parser)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


# ---------------------------------------------------------------------- commands


def _demo(options: argparse.Namespace) -> int:
    import torch

    from pytracer.demo import run
    from pytracer.export.files import refuse_to_overwrite
    from pytracer.export.table import wants_color

    refuse_to_overwrite(options.output, overwrite=options.force)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise errors.UsageError("--device cuda: there is no CUDA device here")

    with _patience("tracing"):
        traced = run(options.steps, options.device)
    written = traced.save(options.output, overwrite=True)
    if options.json:
        _print_json({**_summary_document(traced), "path": str(written)})
        return 0
    print(traced.table(color=wants_color(sys.stdout)))
    print(f"\nWritten to {written}. Look again with:  pytracer summary {written}")
    return 0


def _summary(options: argparse.Namespace) -> int:
    from pytracer.api import load
    from pytracer.export.table import wants_color

    with _patience(f"reading {options.file}"):
        loaded = load(options.file)
        table = loaded.table(color=wants_color(sys.stdout))
    if options.json:
        _print_json(_summary_document(loaded))
        return 0
    print(table)
    if loaded.data.meta.get("failed"):
        print(f"\n{loaded.post_mortem()}")
    _say_if_damaged(options.file, loaded)
    print(f"\nOver time:         pytracer export {options.file}", file=sys.stderr)
    print(f"Against a budget:  pytracer check {options.file} --max-peak SIZE", file=sys.stderr)
    return 0


def _say_if_damaged(file: Path, loaded: Any) -> None:
    """What is shown is then of a part, and nobody is to take it for the whole."""
    status = loaded.file_report.get("status")
    if status not in ("complete", None):
        notes = [f"  {note}" for note in loaded.file_report.get("notes", [])]
        print("\n".join((f"\n{file} is {status}:", *notes)), file=sys.stderr)


def _summary_document(loaded: Any) -> dict[str, Any]:
    peak = loaded.peak
    return {
        "peak": {
            "bytes": peak.bytes,
            "time_ns": peak.time_ns,
            "step": peak.step,
            "phase": peak.phase,
            "by_category": dict(peak.by_category),
        },
        "categories": json.loads(loaded.summary().reset_index().to_json(orient="records")),
        "meta": dict(loaded.data.meta),
        "findings": json.loads(loaded.findings().to_json(orient="records")),
        "file": dict(loaded.data.file_report),
    }


def _diff(options: argparse.Namespace) -> int:
    if options.after is None and options.steps is None:
        raise errors.UsageError("a diff needs a second trace, or --steps 1,3 of this one")
    from pytracer.analysis import diff
    from pytracer.api import load
    from pytracer.export.diff import render

    after_path = options.after or options.before
    before, after = load(options.before), load(after_path)
    _say_if_damaged(options.before, before)
    if options.after:
        _say_if_damaged(after_path, after)
    found = diff.diff(
        before.data, after.data, options.by.split(","), at=options.at, steps=options.steps
    )
    if options.json:
        _print_json(
            {
                "keys": found.keys,
                "before": vars(found.before),
                "after": vars(found.after),
                "rows": [{**vars(row), "kind": row.kind} for row in found.rows],
            }
        )
        return 0
    print(render(found, (str(options.before), str(after_path))))
    return 0


def _export(options: argparse.Namespace) -> int:
    from pytracer.api import load

    kind, output = _export_target(options)
    with _patience(f"exporting {options.file}"):
        loaded = load(options.file)
        _say_if_damaged(options.file, loaded)
        return _export_as(kind, output, loaded, options)


def _export_as(kind: str, output: str, loaded: Any, options: argparse.Namespace) -> int:
    if kind == "chrome":
        return _export_chrome(options, loaded, Path(output))
    if options.max_events is not None:
        raise errors.UsageError("--max-events is for --format chrome")
    writers: dict[str, Callable[..., Path]] = {
        "snapshot": loaded.export_memory_snapshot,
        "html": loaded.export_html,
        "parquet": loaded.to_parquet,
    }
    written = writers[kind](output, overwrite=options.force)
    if options.json:
        _print_json({"format": kind, "path": str(written)})
        return 0
    print(f"Written to {written}.")
    print(_OPENED_WITH[kind].format(written))
    return 0


_OPENED_WITH = {
    "snapshot": "Open it at https://pytorch.org/memory_viz (the file stays on your machine).",
    "html": "Open it in any browser; nothing in it runs or is loaded.",
    "parquet": "Read it with pandas.read_parquet('{}/allocations.parquet').",
}


def _export_target(options: argparse.Namespace) -> tuple[str, str]:
    """The format and where it goes."""
    if options.output is None:
        kind = options.format or "chrome"
        return kind, str(options.file.with_suffix(_SUFFIXES[kind][0]))
    if options.format is not None:
        return options.format, options.output
    for kind, suffixes in _SUFFIXES.items():
        if options.output.endswith(suffixes):
            return kind, options.output
    known = ", ".join(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
    raise errors.UsageError(f"{options.output}: say --format, or end it with one of {known}")


def _export_chrome(options: argparse.Namespace, loaded: Any, output: Path) -> int:
    written = loaded.export_chrome_trace(
        output, overwrite=options.force, max_events=options.max_events
    )
    if options.json:
        _print_json({**vars(written), "path": str(written.path)})
        return 0
    print(f"Written to {written.path}: {written.events:,} events, {written.file_bytes:,} bytes.")
    left_out = ", ".join(f"{count:,} {what}" for what, count in written.left_out.items())
    for note in (*([f"Left out: {left_out}"] if left_out else []), *written.warnings):
        print(note, file=sys.stderr)
    print("Open it at https://ui.perfetto.dev (the file stays on your machine).")
    print(f"The same on one screen:  pytracer summary {options.file}")
    return 0


def _ledger(options: argparse.Namespace) -> int:
    if options.file is None:
        return _ledger_now(options)
    from pytracer.analysis import fragmentation, ledger
    from pytracer.api import load
    from pytracer.export.ledger_text import render

    loaded = load(options.file)
    _say_if_damaged(options.file, loaded)
    trace = loaded.data
    found = ledger.ledger(trace, options.at, options.device)
    layout = fragmentation.layout(trace, options.at, found.device)
    probed = _probe() if options.probe else None
    if options.json:
        document = {
            **vars(found),
            "rows": [vars(row) for row in found.rows],
            "closes": found.closes,
            "fragmentation": fragmentation.summary(layout),
        }
        _print_json({**document, "probe": probed} if probed else document)
        return 0
    print(f"Ledger of {found.device} at the {found.at}")
    print(render(found, layout))
    if probed:
        _print_probe(probed)
    return 0


def _ledger_now(options: argparse.Namespace) -> int:
    """Which process holds what, on every device that NVML shows."""
    from pytracer.capture import device_memory
    from pytracer.export.ledger_text import render_now

    nvml = device_memory.open_nvml()
    if isinstance(nvml, str):
        raise errors.CaptureError(
            f"the devices cannot be read: {nvml}. Of a trace: pytracer ledger FILE"
        )
    gpus = device_memory.read_gpus(nvml, device_memory.all_uuids(nvml))
    device_memory.name_processes(nvml, gpus)
    probed = _probe() if options.probe else None
    if options.json:
        _print_json({"gpus": gpus, **({"probe": probed} if probed else {})})
        return 0
    print(render_now(gpus))
    if probed:
        _print_probe(probed)
    else:
        print("What a bare CUDA context costs here:  pytracer ledger --probe")
    return 0


def _probe() -> dict[str, Any]:
    from pytracer.capture import probe

    return probe.measure()


def _print_probe(probed: dict[str, Any]) -> None:
    from pytracer.export.ledger_text import render_probe

    print(f"\n{render_probe(probed)}")


def _gemm(options: argparse.Namespace) -> int:
    from pytracer.export.files import refuse_to_overwrite
    from pytracer.gemm import commands

    if options.output is not None:
        refuse_to_overwrite(options.output, overwrite=options.force)
    traced = _traced_model(options) if options.what == "advise" and options.file else None
    done = commands.run(
        options,
        traced,
        progress=lambda text: print(text, file=sys.stderr),
        keep=lambda document: _write_json(options.output, document),
    )
    _write_json(options.output, done.document)
    if options.json:
        _print_json(done.document)
    else:
        print(done.text)
    return 0


def _traced_model(options: argparse.Namespace) -> Any:
    """The linear layers that a trace shows, as a model to give advice on."""
    from pytracer.analysis.linear_layers import linear_layers
    from pytracer.gemm import device, presets
    from pytracer.trace import load

    if options.model or options.vocab or options.hidden:
        raise errors.UsageError("a trace or a model's sizes, not both")
    rows = options.batch * options.seq if options.batch and options.seq else None
    kind = device.pick(options.device).type
    return presets.traced(linear_layers(load(options.file), rows), options.dtype, kind)


def _cost(options: argparse.Namespace) -> int:
    if options.each and options.by not in (None, "module"):
        raise errors.UsageError(f"--each is of layers, and by {options.by} there are none")
    by = options.by or ("module" if options.each else "class")
    if options.file is None and not options.measure_peaks:
        raise errors.UsageError(
            "cost needs a trace recorded with trace(cost=True), or --measure-peaks"
        )
    measured = _measure_peaks() if options.measure_peaks else {}
    if options.file is None:
        if options.json:
            _print_json({"peaks": measured})
        return 0
    from pytracer.analysis import cost
    from pytracer.api import load
    from pytracer.cost import peaks as device_peaks
    from pytracer.export.cost_text import render

    loaded = load(options.file)
    _say_if_damaged(options.file, loaded)
    trace = loaded.data
    name = cost.measured(trace).device_name
    peaks = measured.get(name) or device_peaks.cached(name)
    if options.json:
        rows = [vars(row) for row in cost.rows(trace, by, peaks)]
        missing = [vars(each) for each in cost.uncounted(trace)]
        found = {k: v for k, v in vars(cost.measured(trace)).items() if k != "records"}
        _print_json({**found, "by": by, "rows": rows, "uncounted": missing})
        return 0
    print(render(trace, by, peaks, each=options.each))
    return 0


def _measure_peaks() -> dict[str, Any]:
    """Of the GPU, or of the CPU where there is none; by the device's name."""
    import torch

    from pytracer.cost import peaks

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name, found = peaks.device_name(device), peaks.measure(device)
    rates = ", ".join(f"{k} {v / 1e12:.3g}" for k, v in found["flops_per_s"].items())
    copied = found["copy_bytes_per_s"] / 1e9
    print(f"{name}: {rates} TFLOP/s, copy {copied:.4g} GB/s", file=sys.stderr)
    return {name: found}


def _confirm(options: argparse.Namespace) -> int:
    from pytracer.claims import commands

    done = commands.run(options, progress=lambda text: print(text, file=sys.stderr))
    if options.json:
        _print_json(done.document)
    else:
        print(done.text)
    return done.exit_code


def _doctor(options: argparse.Namespace) -> int:
    import torch

    from pytracer import doctor
    from pytracer.capture.session import allocator_settings

    found = {
        "pytracer": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "devices": [
            torch.cuda.get_device_name(i)
            for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        ],
        "allocator_settings": allocator_settings(),
    }
    if not options.json:
        for name, value in found.items():
            shown = ", ".join(value) if isinstance(value, list) else value
            print(f"{name:20} {shown or 'none'}")
    results = []
    for check in doctor.checks():
        results.append(vars(check))
        if not options.json:
            print(f"{check.name:20} {check.verdict:7} {check.detail}")
    failed = any(check["verdict"] == "failed" for check in results)
    if options.json:
        _print_json({**found, "checks": results})
    elif not failed:
        print("\nTry it:  pytracer demo", file=sys.stderr)
    return 1 if failed else 0


# ---------------------------------------------------------------------- run

_RUN_HELP = """\
Runs a script as Python would, with its arguments, and records its memory:

  pytracer run train.py --lr 0.1              its first 5 steps, into train.pytrace
  pytracer run -o run.pytrace -m my.training  a module, as python -m
  pytracer run --steps 50 --stacks train.py   more steps, and Python lines
  torchrun --nproc-per-node 8 -m pytracer run train.py      one file per rank
  accelerate launch -m pytracer run train.py

A step ends at every optimizer.step(). The first steps are written to the file as they happen, so
that a killed process leaves one. The rest is watched, 20 steps at a time and without keeping
them: if an allocation fails later on, it is explained and saved as well. --no-watch stops
tracing after the first steps. A program without steps is recorded to its end.

Options for pytracer come before the script; what comes after it is the script's own. Its exit
code, signals and tracebacks are what they are without pytracer. In a launcher's other ranks only
rank 0 talks.
"""


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a script or module and record its memory",
        description=_RUN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="pytracer run [options] (SCRIPT | -m MODULE) [arguments]",
    )
    run.add_argument("-o", "--output", type=Path, help="default: SCRIPT.pytrace")
    run.add_argument("-f", "--force", action="store_true", help="overwrite the output file")
    run.add_argument(
        "--steps", type=_steps, default=5, metavar="N", help='steps to keep (default 5; or "all")'
    )
    run.add_argument(
        "--schedule",
        type=_schedule,
        metavar="WAIT,WARMUP,ACTIVE",
        help="which steps to keep instead, as torch.profiler.schedule counts them",
    )
    run.add_argument("--no-watch", action="store_true", help="do not trace the steps after those")
    run.add_argument("--stacks", action="store_true", help="also the Python line of everything")
    run.add_argument("--detail", choices=("op", "category"), default="op")
    run.add_argument("--saved-tensors", choices=("auto", "hooks"), default="auto")
    run.add_argument("--device", choices=("cpu", "cuda"), help="default: both, where CUDA is")
    run.add_argument("--json", type=Path, metavar="FILE", help="also the summary as JSON, there")
    run.set_defaults(run=None)


def _steps(text: str) -> int | None:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f'{text} is neither a number of steps nor "all"')
    return None if text == "all" else _positive(text)


def _schedule(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) if part.isdecimal() else -1 for part in text.split(","))
    if len(numbers) != 3 or min(numbers) < 0 or numbers[2] < 1:
        raise argparse.ArgumentTypeError(f"{text} is not WAIT,WARMUP,ACTIVE, say 1,1,3")
    return numbers


_TAKE_A_VALUE = {"-o", "--output", "--steps", "--schedule", "--detail", "--saved-tensors"}
_TAKE_A_VALUE |= {"--device", "--json"}


def _without_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits `run`'s own options from the program, whose options are none of our business.

    A module's program begins with "-m".
    """
    given = list(arguments)
    if not given or given[0] != "run":
        return given, []
    at = 1
    while at < len(given):
        if given[at] == "--":
            return given[:at], given[at + 1 :]
        if given[at] == "-m" or not given[at].startswith("-"):
            return given[:at], given[at:]
        at += 2 if given[at] in _TAKE_A_VALUE else 1
    return given, []


def _run(options: argparse.Namespace, program: list[str]) -> int:
    """What the program raises is not caught: Python ends as it would without us."""
    from pytracer import runner

    as_module = program[:1] == ["-m"]
    words = program[1:] if as_module else program
    if not words:
        print("pytracer: run what? pytracer run train.py, or pytracer run -h", file=sys.stderr)
        return errors.UsageError.exit_code
    plan = runner.Plan(
        program=tuple(words),
        as_module=as_module,
        output=options.output,
        force=options.force,
        skip=sum(options.schedule[:2]) if options.schedule else 0,
        steps=options.schedule[2] if options.schedule else options.steps,
        watch=not options.no_watch,
        devices=(options.device,) if options.device else (),
        options={
            "stacks": options.stacks,
            "detail": options.detail,
            "saved_tensors": options.saved_tensors,
        },
    )
    prepared: Callable[[], int]
    try:
        prepared = runner.prepare(plan, _Teller(options.json, options.force))
    except errors.PytracerError as error:
        print(f"pytracer: {_in_words(error)}", file=sys.stderr)
        return error.exit_code
    return prepared()


class _Teller:
    """What `run` says to people: rank 0 speaks for all, but nobody dies in silence."""

    def __init__(self, json_file: Path | None, force: bool) -> None:
        from pytracer import runner
        from pytracer.export.files import refuse_to_overwrite

        self._rank, self._json = runner.rank(), json_file
        if self._rank == 0 and json_file is not None:
            refuse_to_overwrite(json_file, overwrite=force)

    def line(self, text: str) -> None:
        if self._rank == 0:
            print(f"pytracer: {text}", file=sys.stderr)

    def recorded(self, traced: Any, path: Path) -> None:
        if self._rank != 0:
            return
        from pytracer.export.table import wants_color

        with _patience("analysing"):
            table = traced.table(color=wants_color(sys.stderr))
        print(f"\n{table}\n\nWritten to {path}. Look again with:", file=sys.stderr)
        print(f"  pytracer summary {path}", file=sys.stderr)
        print(f"  pytracer export {path}    a timeline for Perfetto", file=sys.stderr)
        try:
            _write_json(self._json, _summary_document(traced))
        except errors.CannotWrite as problem:  # the training goes on
            self.line(str(problem))

    def page(self, text: str) -> None:
        if self._rank == 0:
            print(f"\n{text}", file=sys.stderr)
        else:
            last = text.splitlines()[-1]
            print(f"pytracer: rank {self._rank}: {' '.join(last.split())}", file=sys.stderr)


# ---------------------------------------------------------------------- check


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="hold a saved trace against a budget; exit code 3 if it is exceeded",
        description="Sizes are written 40GiB (of 1024), 1.5GB (of 1000), 5000 (bytes).",
    )
    check.add_argument("file", type=Path, help="a .pytrace file")
    check.add_argument("--max-peak", metavar="SIZE", help="of all memory at once")
    check.add_argument(
        "--max",
        action="append",
        default=[],
        metavar="CATEGORY=SIZE",
        help="of one category at its own peak, say activations=10GiB; may be repeated",
    )
    check.add_argument("--max-growth", metavar="SIZE", help="per step, once the first is over")
    check.add_argument("--baseline", type=Path, metavar="FILE", help="show what grew since this")
    check.add_argument(
        "--max-increase", metavar="SIZE|PERCENT", help="of the peak over the baseline's, say 5%%"
    )
    check.add_argument("--json", action="store_true", help="one JSON document on stdout")
    check.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    from pytracer.analysis import budgets
    from pytracer.api import load
    from pytracer.export import budget
    from pytracer.export.table import size_text

    limits = _limits(options)
    with _patience(f"reading {options.file}"):
        loaded = load(options.file)
        baseline = load(options.baseline) if options.baseline else None
        if options.max_increase is not None:
            assert baseline is not None
            allowed = _increase(options.max_increase, baseline.peak.bytes)
            limits["peak"] = min(limits.get("peak", allowed), allowed)
        exceeded = loaded.check(**limits)
        if not exceeded:
            _require_whole(options.file, loaded)
        changed = [] if baseline is None else budgets.differences(loaded.data, baseline.data)
    if options.json:
        _print_json(
            {
                "file": str(options.file),
                "limits": {name: budgets.parse_size(size) for name, size in limits.items()},
                "peak": loaded.peak.bytes,
                "exceeded": [vars(row) for row in exceeded],
                "differences": [vars(row) for row in changed],
            }
        )
        return errors.BudgetExceeded.exit_code if exceeded else 0
    if exceeded:
        print(f"{loaded.table()}\n")
    if baseline is not None:
        print("\n".join((*budget.difference_lines(changed), "")))
    if exceeded:
        print("\n".join(budget.exceeded_lines(exceeded)))
        closer = f"diff {options.baseline}" if options.baseline else "export"
        print(f"Look closer with:  pytracer {closer} {options.file}")
        return errors.BudgetExceeded.exit_code
    print(f"Within the budget: the peak is {size_text(loaded.peak.bytes)}.")
    return 0


def _require_whole(file: Path, loaded: Any) -> None:
    """What is missing may have been more than the budget: that is not to pass for keeping it."""
    status = loaded.file_report.get("status")
    if status not in ("complete", None):
        raise errors.UnreadableTrace(
            f"{file} is {status}: what is left of it is within the budget, and what is missing may "
            "not have been; record it again"
        )
    if "lost_alloc" in loaded.health().index:
        raise errors.UnreadableTrace(
            f"{file} lacks allocations that did not fit into the recording: what is there is within "
            "the budget; record it again with path=, or fewer steps"
        )
    if not len(loaded.data.events.ticks):
        raise errors.UnreadableTrace(
            f"{file} has no memory event in it, so it shows nothing of any budget: was the model on "
            "a traced device, and the training in this process?"
        )


def _limits(options: argparse.Namespace) -> dict[str, int | str]:
    from pytracer.analysis.budgets import parse_size

    limits: dict[str, int | str] = {}
    if options.max_peak is not None:
        limits["peak"] = parse_size(options.max_peak)
    for text in options.max:
        name, equals, size = text.partition("=")
        if not equals:
            raise errors.UsageError(f"--max {text}: say which, as in --max activations=10GiB")
        limits[name] = parse_size(size)
    if options.max_growth is not None:
        limits["growth_per_step"] = parse_size(options.max_growth)
    if options.max_increase is not None and options.baseline is None:
        raise errors.UsageError("--max-increase is over a --baseline: name one")
    if not limits and options.max_increase is None:
        raise errors.UsageError("check against what? say --max-peak 40GiB, or see check -h")
    return limits


def _increase(text: str, before: int) -> int:
    """The peak that is allowed."""
    from pytracer.analysis.budgets import parse_size

    if text.endswith("%"):
        try:
            return before + int(before * float(text[:-1]) / 100)
        except ValueError:
            raise errors.UsageError(f"--max-increase {text}: that is no percentage") from None
    return before + parse_size(text)


# ---------------------------------------------------------------------- printing


def _in_words(error: errors.PytracerError) -> str:
    """What is said to somebody who typed a command, and not to a program."""
    return error.at_the_command_line if isinstance(error, errors.FileIsThere) else str(error)


@contextmanager
def _patience(doing: str) -> Iterator[None]:
    """Says what takes so long, if it takes longer than two seconds."""
    timer = threading.Timer(2.0, lambda: print(f"pytracer: {doing} ...", file=sys.stderr))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print_json(document: dict[str, Any]) -> None:
    print(_json_text(document))


def _json_text(document: dict[str, Any]) -> str:
    return json.dumps({"pytracer_json": JSON_VERSION, **document}, indent=2)


def _write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Whole or not at all: a reader never meets half a document."""
    if path is None:
        return
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(_json_text(document) + "\n")
        part.replace(path)
    except OSError as error:
        raise errors.CannotWrite(f"cannot write {path}: {error.strerror}") from None
