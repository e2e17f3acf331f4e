"""The arguments of `pytracer confirm`. Importing this module does not import torch."""

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to a parser."""
    parser.add_argument("ids", nargs="*", metavar="ID", help="claims, say K1 O2 (default: all)")
    parser.add_argument(
        "--list", action="store_true", help="the claims, and what each is judged by"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("pytracer-confirm"),
        metavar="FOLDER",
        help="measurements and traces; what is there is used again (default: pytracer-confirm)",
    )
    parser.add_argument("--again", action="store_true", help="measure also what was measured")
    parser.add_argument(
        "--kept", action="store_true", help="measure nothing: judge what was measured already"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if any")
    parser.add_argument(
        "--quick", action="store_true", help="the scaled-down set, which a CPU always runs"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the page")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("-f", "--force", action="store_true", help="overwrite the page")
