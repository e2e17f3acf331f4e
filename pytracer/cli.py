"""The command line: the only place that prints, and the only one that decides how to exit.

What a program reads goes to stdout (`--json`, one document with a version); what a person reads
is plain text. Errors are one line on stderr, and the exit code says which kind they are.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.version import __version__

JSON_VERSION = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return errors.UsageError.exit_code
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except errors.PytracerError as error:
        print(f"pytracer: {error}", file=sys.stderr)
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
    demo.set_defaults(run=_demo)

    summary = commands.add_parser("summary", help="show a saved trace on one screen")
    summary.add_argument("file", type=Path, help="a .pytrace file")
    summary.add_argument("--json", action="store_true", help="one JSON document on stdout")
    summary.set_defaults(run=_summary)

    export = commands.add_parser(
        "export", help="a saved trace as a timeline for https://ui.perfetto.dev"
    )
    export.add_argument("file", type=Path, help="a .pytrace file")
    export.add_argument(
        "-o", "--output", type=Path, help=".json or .json.gz (default: beside the trace, .json.gz)"
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

    doctor = commands.add_parser(
        "doctor", help="what works here, what does not, and what to do about it"
    )
    doctor.add_argument("--json", action="store_true", help="one JSON document on stdout")
    doctor.set_defaults(run=_doctor)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


# ---------------------------------------------------------------------- commands


def _demo(options: argparse.Namespace) -> int:
    if options.output.exists() and not options.force:
        raise errors.CannotWrite(f"{options.output} exists; -f overwrites it, -o names another")
    from pytracer.demo import run
    from pytracer.export.table import wants_color

    traced = run(options.steps, options.device)
    print(traced.table(color=wants_color(sys.stdout)))
    written = traced.save(options.output, overwrite=True)
    print(f"\nWritten to {written}. Look again with:  pytracer summary {written}")
    return 0


def _summary(options: argparse.Namespace) -> int:
    from pytracer.api import load
    from pytracer.export.table import wants_color

    loaded = load(options.file)
    if options.json:
        _print_json(_summary_document(loaded))
        return 0
    print(loaded.table(color=wants_color(sys.stdout)))
    if loaded.data.meta.get("failed"):
        print(f"\n{loaded.post_mortem()}")
    status = loaded.file_report.get("status")
    if status != "complete":
        print(f"\nThis file is {status}:", file=sys.stderr)
        for note in loaded.file_report.get("notes", []):
            print(f"  {note}", file=sys.stderr)
    return 0


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
        "file": loaded.file_report,
    }


def _export(options: argparse.Namespace) -> int:
    from pytracer.api import load

    output = options.output or options.file.with_suffix(".json.gz")
    written = load(options.file).export_chrome_trace(
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

    trace = load(options.file).data
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
        raise errors.CaptureError(f"the devices cannot be read: {nvml}")
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


def _doctor(options: argparse.Namespace) -> int:
    import torch

    from pytracer import doctor

    found = {
        "pytracer": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "devices": [
            torch.cuda.get_device_name(i)
            for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        ],
        "allocator_settings": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        or os.environ.get("PYTORCH_ALLOC_CONF", ""),
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
    if options.json:
        _print_json({**found, "checks": results})
    return 1 if any(check["verdict"] == "failed" for check in results) else 0


# ---------------------------------------------------------------------- printing


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps({"pytracer_json": JSON_VERSION, **document}, indent=2))
