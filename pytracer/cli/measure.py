"""Commands that measure: gemm, cost, confirm."""

import argparse
import sys
from typing import Any

from pytracer import errors
from pytracer.cli import output
from pytracer.cli.command import Command


class Gemm(Command):
    """Which matrix shapes this device likes, and the gain from padding yours.

    Times matrix multiplications here, or those of a traced model's layers:

      pytracer gemm find-peak             the highest rate here, by dtype
      pytracer gemm sweep                 products of many sizes and alignments
      pytracer gemm advise train.pytrace  which size to pad, and the gain
    """

    name = "gemm"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from pytracer.lab.gemm import arguments

        arguments.add(parser)

    def run(self, options: argparse.Namespace) -> int:
        from pytracer.basics.files import refuse_to_overwrite
        from pytracer.lab.gemm import commands

        if options.output is not None:
            refuse_to_overwrite(options.output, overwrite=options.force)
        traced = _traced_model(options) if options.what == "advise" and options.file else None
        done = commands.run(
            options,
            traced,
            progress=lambda text: print(text, file=sys.stderr),
            keep=lambda document: output.write_json(options.output, document),
        )
        output.write_json(options.output, done.document)
        if options.json:
            output.print_json(done.document)
        else:
            print(done.text)
        return 0


def _traced_model(options: argparse.Namespace) -> Any:
    """The linear layers of a trace, as a model for the advice."""
    from pytracer.lab.gemm import device, presets
    from pytracer.lab.gemm.traced import linear_layers

    described = ("model", "vocab", "hidden", "ffn", "layers")
    given = [f"--{name}" for name in described if getattr(options, name) is not None]
    if given:
        raise errors.UsageError(
            f"give a trace or a model's sizes, not both: leave out {' '.join(given)}"
        )
    for name in ("batch", "seq"):
        if (size := getattr(options, name)) is not None and size < 1:
            raise errors.UsageError(f"--{name} is {size}: it must be at least 1")
    if (options.batch is None) != (options.seq is None):
        raise errors.UsageError("for a trace --batch and --seq go together: give both, or neither")
    rows = None if options.batch is None else options.batch * options.seq
    kind = device.pick(options.device).type
    return presets.traced(linear_layers(output.read(options.file).data, rows), options.dtype, kind)


class Cost(Command):
    """The cost of each part, forward and backward, beside the textbook's ratios.

    Reads traces that were recorded with `trace(cost=True)`.

      pytracer cost train.pytrace                 by class of operator
      pytracer cost train.pytrace --by module     layers that are alike together
      pytracer cost --measure-peaks               this device's highest rates
    """

    name = "cost"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        output.add_trace(parser, "a .pytrace file recorded with trace(cost=True)")
        parser.add_argument("--by", choices=("class", "module", "op"), help="default: class")
        parser.add_argument(
            "--each", action="store_true", help="with --by module: a row for every layer"
        )
        parser.add_argument(
            "--measure-peaks",
            action="store_true",
            help="measure this device's peak rates, and keep them",
        )
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        if options.each and options.by not in (None, "module"):
            raise errors.UsageError(f"--each needs --by module, not --by {options.by}")
        by = options.by or ("module" if options.each else "class")
        if options.file is None and not options.measure_peaks:
            options.file = output.trace_or_newest(None)
        measured = _measure_peaks() if options.measure_peaks else {}
        if options.file is None:
            if options.json:
                output.print_json({"peaks": measured})
            return 0
        from pytracer.cost import measurements, peaks as device_peaks, table as cost_table
        from pytracer.export import terminal
        from pytracer.export.cost_text import render

        trace = output.read(options.file).data
        name = measurements.measured(trace).device_name
        peaks = measured.get(name) or device_peaks.cached(name)
        if options.json:
            rows = [vars(row) for row in cost_table.rows(trace, by, peaks)]
            missing = [vars(each) for each in cost_table.uncounted(trace)]
            head = {k: v for k, v in vars(measurements.measured(trace)).items() if k != "records"}
            output.print_json({**head, "by": by, "rows": rows, "uncounted": missing})
            return 0
        print(render(trace, by, peaks, each=options.each, terminal=terminal.here()))
        return 0


def _measure_peaks() -> dict[str, Any]:
    """The peaks of the GPU, or of the CPU if there is no GPU, by the device's name."""
    import torch

    from pytracer.cost import peaks
    from pytracer.export.cost_text import peaks_text

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name, measured = peaks.device_name(device), peaks.measure(device)
    print(f"{name}: {peaks_text(measured)}", file=sys.stderr)
    return {name: measured}


class Confirm(Command):
    """Published claims about training memory, measured again on this machine.

    Runs an experiment for each claim, and says whether it holds here:

      pytracer confirm --list             the claims, and what judges each
      pytracer confirm --quick            the scaled-down set, on any CPU
      pytracer confirm --markdown claims.md
    """

    name = "confirm"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from pytracer.lab.claims import arguments

        arguments.add(parser)

    def run(self, options: argparse.Namespace) -> int:
        from pytracer.lab.claims import commands

        done = commands.run(options, progress=lambda text: print(text, file=sys.stderr))
        if options.json:
            output.print_json(done.document)
        else:
            print(done.text)
        return done.exit_code
