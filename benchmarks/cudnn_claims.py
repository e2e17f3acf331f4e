"""Holds what imagined runs say of convolutions' scratch against the passes that were measured on a card.

    python benchmarks/cudnn_claims.py --out benchmarks/results     # needs cuDNN (pytracer[cudnn]), no GPU
    python benchmarks/cudnn_claims.py --answers tests/data/cudnn_answers.json    # what the tests ask

A pass is exact if its two bounds are the same block. An exact pass is right if the card took that block,
and an interval if the card took something between its bounds.

A draw is held out when it is measured, because the rules are there. What was first said of it is kept,
because rules that have changed since may know it.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import kept  # noqa: E402
from benchmarks.imagine import write  # noqa: E402
from pytracer.imagined import convolutions, cudnn  # noqa: E402
from pytracer.imagined.cards import find  # noqa: E402
from pytracer.imagined.scratch import Scratch  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
FILES = {
    f"cudnn-{name}-nvidia-h100-80gb-hbm3.json": title
    for name, title in (
        ("scratch", "chosen shapes"),
        ("drawn-1", "a first draw"),
        ("drawn-2", "a second draw"),
        ("drawn-3", "a third draw"),
        ("drawn-4", "a fourth draw"),
    )
}
HELD_OUT = tuple(FILES)[-1]
NAME = "cudnn-claims"
COUNTS = ("passes", "exact", "exact_and_right", "within")
OPERATIONS = ("forward", "input", "weight")
ASKED = ("operation", "dtype", "x", "w", "y", "padding", "stride", "dilation", "tf32")
ANSWERED = ("engine", "knobs", "bytes", "allowed", "unsplit", "fewer")
EVERY = 9  # row of which the tests know the answers
# Input and weight of passes of which something wrong was said once.
WRONG_ONCE = (
    ([1, 3, 28, 28], [64, 3, 1, 1]),  # a product whose rows are no multiple of 16 bytes
    ([1, 16, 1500], [128, 16, 1]),  # a product of one image, with little to do
    ([8, 64, 56, 56], [48, 64, 4, 4]),  # a Fourier transform with TensorFloat-32
    ([32, 128, 33, 33], [64, 128, 3, 3]),  # more than the spectra of tiles
    ([4, 128, 64], [48, 128, 7]),  # the spectra of a whole square around a row
    ([4, 128, 7, 7], [512, 32, 3, 3]),  # Winograd's algorithm for channels in groups
)
LITTLE = 512  # bytes: less is the same block


class Claim(NamedTuple):
    """What was said of one pass, and what it took."""

    row: dict[str, Any]
    operation: str
    said: Scratch
    measured: int

    @property
    def is_exact(self) -> bool:
        """Whether one block was said."""
        return self.said.most - self.said.least <= LITTLE

    @property
    def is_right(self) -> bool:
        """Whether the card took what was said."""
        return self.said.least - LITTLE <= self.measured <= self.said.most + LITTLE


def claims(rows: Iterable[dict[str, Any]], known: convolutions.Convolutions) -> Iterator[Claim]:
    """Yields what is said of each pass of each measured row."""
    before = torch.backends.cudnn.allow_tf32
    try:
        for row in rows:
            if "of_forward" not in row:
                continue
            torch.backends.cudnn.allow_tf32 = row.get("tf32", True)
            for operation, said in zip(OPERATIONS, _said(row, known), strict=True):
                yield Claim(row, operation, said, row[f"of_{operation}"])
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _said(row: dict[str, Any], known: convolutions.Convolutions) -> list[Scratch]:
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(len(row["input"])) if row["last"] else None
    ways = len(row["input"]) - 2
    how = [[row[name]] * ways for name in ("stride", "padding", "dilation")]
    rest = (row["transposed"], [0] * ways, row["groups"])
    with torch.device("meta"):
        dtype = getattr(torch, row["dtype"])
        x, w = (
            torch.empty(row[name], dtype=dtype).to(memory_format=layout or torch.contiguous_format)
            for name in ("input", "weight")
        )
        y = torch.ops.aten.convolution.default(x, w, None, *how, *rest)
        y = y.to(memory_format=layout or torch.contiguous_format)
    forward, backward = torch.ops.aten.convolution, torch.ops.aten.convolution_backward
    made = known.taken(forward.default, (x, w, None, *how, *rest), y)
    given = (y, x, w, None, *how, *rest, [True, True, False])
    made += known.taken(backward.default, given, (x, w, None))
    return [said for _, said in made]


def counted(found: Iterable[Claim]) -> dict[str, int]:
    """How many passes there were, were exact, were exact and right, and were within their bounds."""
    listed = list(found)
    return {
        "passes": len(listed),
        "exact": sum(one.is_exact for one in listed),
        "exact_and_right": sum(one.is_exact and one.is_right for one in listed),
        "within": sum(one.is_right for one in listed),
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--answers", type=Path, help="keep what cuDNN says of every ninth row")
    options = parser.parse_args()
    library = cudnn.installed()
    if library is None:
        parser.exit(1, f"cuDNN is not installed: {cudnn.ADVICE}\n")
    known = convolutions.Convolutions(find("H100"), library)
    if options.answers:
        kept.write(options.answers, _answers(library))
        library.close()
        return
    documents = {file: kept.read(RESULTS / file) for file in FILES}
    found: dict[str, dict[str, Any]] = {
        file: {
            "title": FILES[file],
            "measured": {
                name: document["machine"][name] for name in ("device", "torch", "cudnn", "date")
            },
            **counted(claims(document["convolutions"], known)),
        }
        for file, document in documents.items()
    }
    known.close()
    for file, first in {HELD_OUT: kept.only(found[HELD_OUT], *COUNTS), **_firsts()}.items():
        found[file]["first"] = first
    print(found)
    write(options.out, NAME, {"files": found}, device="cpu")


class Remembers:
    """A cuDNN whose answers are kept."""

    def __init__(self, library: cudnn.Cudnn) -> None:
        """Asks this one."""
        self._library = library
        self.said: dict[str, dict[str, Any]] = {}
        self.start, self.close = library.start, library.close

    @property
    def version(self) -> int:
        """Of the library."""
        return self._library.version

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Its answer."""
        answer = self._library.ask(question)
        of = kept.only(question, *ASKED)
        self.said[json.dumps(of)] = {**of, "answer": [answer.get(one) for one in ANSWERED]}
        return answer


def _answers(library: cudnn.Cudnn) -> dict[str, Any]:
    asked = Remembers(library)
    known = convolutions.Convolutions(find("H100"), asked)  # type: ignore[arg-type]
    for file in FILES:
        rows = kept.read(RESULTS / file)["convolutions"]
        others = [one for one in rows if (one["input"], one["weight"]) in WRONG_ONCE]
        for _ in claims([*rows[::EVERY], *others], known):
            pass
    return {"cudnn": library.version, "every": EVERY, "answers": [*asked.said.values()]}


def _firsts() -> dict[str, dict[str, int]]:
    """What was first said of the draws that were held out, as far as it was kept."""
    path = RESULTS / f"{NAME}-cpu.json"
    files = kept.read(path)["files"] if path.exists() else {}
    return {file: one["first"] for file, one in files.items() if "first" in one}


if __name__ == "__main__":
    main()
