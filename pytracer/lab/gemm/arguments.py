"""The arguments of `pytracer gemm`. Importing this module does not import torch."""

import argparse
import math
from pathlib import Path

from pytracer.lab.gemm.presets import MODELS
from pytracer.lab.gemm.shapes import DTYPES, LIBRARIES, ROLES

_MEANING = {
    "vocab": "classes of the output layer",
    "hidden": "width of the residual stream",
    "ffn": "width inside the feed-forward network (default 4 times hidden)",
    "layers": "blocks (default 12)",
    "batch": "sequences in a step",
    "seq": "tokens in a sequence",
}
_COMMANDS = {
    "sweep": (
        "time products of many sizes and alignments",
        """Times matrix multiplications, and shows which sizes and alignments are fast:

  pytracer gemm sweep --n 4088:4104 --plot widths.svg
  pytracer gemm sweep --m 8192 --around waves --dtype bf16
""",
    ),
    "find-peak": (
        "measure the highest rate of this device, by dtype",
        """Times the sizes that are usually fastest, and shows the highest rate:

  pytracer gemm find-peak
  pytracer gemm find-peak --dtype bf16 --seconds 20
""",
    ),
    "advise": (
        "find the size of a model to pad, and the gain",
        """Times the products of a model's layers, and sizes near to them:

  pytracer gemm advise train.pytrace
  pytracer gemm advise --model gpt2 --vocab 50257 --step-ms 120
""",
    ),
}
_SIZES = "4096, or 4096,8192, or 4088:4104, or 4088:4104:4"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds sweep, find-peak and advise to a parser."""
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    _add_sweep(_command(commands, "sweep"))
    _add_timing(_command(commands, "find-peak"), "all that the device has")
    _add_advise(_command(commands, "advise"))


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str
) -> argparse.ArgumentParser:
    line, examples = _COMMANDS[name]
    return commands.add_parser(
        name,
        help=line,
        description=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_sweep(sweep: argparse.ArgumentParser) -> None:
    for name in ("m", "n", "k"):
        sweep.add_argument(f"--{name}", help=f"sizes: {_SIZES} (default 4096; on a CPU 512)")
    sweep.add_argument("--batch", type=int, default=1, help="number of products in one call (bmm)")
    sweep.add_argument(
        "--around",
        choices=("alignment", "waves"),
        help="vary m, n and k through every alignment, or n across full waves of tiles "
        "(default: alignment if each has one size, else every combination)",
    )
    sweep.add_argument("--vary", default="n,k,m", help="the dimensions to vary (default n,k,m)")
    sweep.add_argument("--roles", default=",".join(ROLES), help=f"of {', '.join(ROLES)}")
    sweep.add_argument("--plot", type=Path, help="also draw it: .png or .svg (needs matplotlib)")
    _add_timing(sweep, "all that the device has")


def _add_advise(advise: argparse.ArgumentParser) -> None:
    advise.add_argument("file", type=Path, nargs="?", help="a .pytrace file")
    advise.add_argument("--model", help=f"one of {', '.join(MODELS)}")
    for name in ("vocab", "hidden", "ffn", "layers", "batch", "seq"):
        advise.add_argument(f"--{name}", type=int, metavar="N", help=_MEANING[name])
    advise.add_argument(
        "--step-ms",
        type=_duration,
        help="duration of a training step; gains are also shown as a share of it",
    )
    advise.add_argument(
        "--compiled",
        action="store_true",
        help="time through torch.compile, which pads some products itself",
    )
    _add_timing(advise, "the trace's, else bf16")


def _add_timing(command: argparse.ArgumentParser, default: str) -> None:
    """Options of all three; `default` says which number formats are timed without --dtype."""
    command.add_argument("--dtype", help=f"of {', '.join(DTYPES)} (default: {default})")
    command.add_argument("--device", help="cpu, cuda or cuda:N (default: the GPU, if any)")
    command.add_argument(
        "--library", help=f"CUDA's: of {', '.join(LIBRARIES)} (default: torch's choice)"
    )
    command.add_argument(
        "--seconds",
        type=_duration,
        default=100.0,
        help="about how long to time products; preparing them takes extra time (default 100)",
    )
    command.add_argument("--json", action="store_true", help="one JSON document on stdout")
    command.add_argument("-o", "--output", type=Path, help="write the JSON document there")
    command.add_argument("-f", "--force", action="store_true", help="overwrite the output file")


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:  # nan is neither
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
