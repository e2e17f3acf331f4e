"""Asks cuDNN on a card what recurrent layers take and keep, and keeps some of its answers.

    python benchmarks/cudnn_layers.py --out benchmarks/results     # needs a GPU; some seconds

cuDNN says it of descriptions, and runs nothing. So thousands of layers are asked about in a second.
"""

import argparse
import ctypes
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.imagine import write  # noqa: E402
from pytracer.imagined import cudnn  # noqa: E402
from pytracer.imagined.recurrent_scratch import Layer, kept_for_backward, needed  # noqa: E402

TYPES = {"float32": 0, "float16": 2, "bfloat16": 9}  # cuDNN's numbers
STANDARD, SMALL = 0, 3  # algorithms
COUNT, KEPT = 40_000, 1500
COLUMNS = (
    "mode", "dtype", "tf32", "algorithm", "directions", "layers", "dropout", "width", "hidden", "length",
    "batch", "packed", "trains",
)  # fmt: skip
LITTLE = 600  # bytes, by which cuDNN aligns its parts


def drawn(seed: int) -> Iterator[tuple[Any, ...]]:
    """Yields layers, as COLUMNS."""
    chance = random.Random(seed)
    while True:
        hidden, width = (
            chance.choice(
                (chance.randint(1, 600), 8 * chance.randint(1, 150), 64 * chance.randint(1, 32))
            )
            for _ in range(2)
        )
        yield (
            chance.randrange(4),
            chance.choice(list(TYPES)),
            chance.random() < 0.5,
            chance.choice((STANDARD, STANDARD, SMALL)),
            chance.choice((1, 2)),
            chance.choice((1, 1, 2, 3, 4)),
            chance.choice((0.0, 0.0, 0.3)),
            chance.choice((width, hidden)),
            hidden,
            chance.choice((1, 2, chance.randint(1, 200), 128)),
            chance.choice((1, 2, 3, 16, chance.randint(1, 70))),
            chance.random() < 0.15,
            chance.random() < 0.8,
        )  # fmt: skip


def said_of(row: dict[str, Any]) -> tuple[int, int]:
    """The scratch and the reserve of a layer, by our rules."""
    layer = Layer(
        mode=row["mode"],
        hidden=row["hidden"],
        layers=row["layers"],
        directions=row["directions"],
        rows=row["length"] * row["batch"],
        length=row["length"],
        batch=row["batch"],
        width=row["width"],
        item=4 if row["dtype"] == "float32" else 2,
        dropout=row["dropout"],
        trains=row["trains"],
        is_bfloat16=row["dtype"] == "bfloat16",
        is_packed=row["packed"],
    )
    is_resident = row["algorithm"] == SMALL and not layer.is_bfloat16
    return needed(layer, is_resident=is_resident), kept_for_backward(layer) if layer.trains else 0


class Asker:
    """cuDNN, and its descriptors of a layer."""

    def __init__(self, library: Any) -> None:
        """`library`: cuDNN's, by ctypes."""
        self._cudnn = library
        self._handle, self._layer, self._rows, self._dropout = (ctypes.c_void_p() for _ in range(4))
        for make, made in (
            (library.cudnnCreate, self._handle),
            (library.cudnnCreateRNNDescriptor, self._layer),
            (library.cudnnCreateRNNDataDescriptor, self._rows),
            (library.cudnnCreateDropoutDescriptor, self._dropout),
        ):
            _check(make(ctypes.byref(made)))
        size = ctypes.c_size_t()
        _check(library.cudnnDropoutGetStatesSize(self._handle, ctypes.byref(size)))
        self._states = torch.empty(size.value, dtype=torch.uint8, device="cuda")

    def ask(self, row: dict[str, Any]) -> tuple[int, int] | None:
        """The scratch and the reserve; None if there is no such kernel."""
        of_type, is_float32 = TYPES[row["dtype"]], row["dtype"] == "float32"
        _check(
            self._cudnn.cudnnSetDropoutDescriptor(
                self._dropout, self._handle, ctypes.c_float(row["dropout"]),
                ctypes.c_void_p(self._states.data_ptr()), ctypes.c_size_t(self._states.numel()), ctypes.c_ulonglong(1),
            )
        )  # fmt: skip
        products = (0 if row["tf32"] else 3) if is_float32 else 1
        if self._cudnn.cudnnSetRNNDescriptor_v8(
            self._layer, row["algorithm"], row["mode"], 2, row["directions"] - 1, 0, of_type, 0, products,
            row["width"], row["hidden"], row["hidden"], row["layers"], self._dropout, int(not row["packed"]),
        ):  # fmt: skip
            return None
        lengths = (ctypes.c_int * row["batch"])(*[row["length"]] * row["batch"])
        filling = ctypes.c_float(0)
        _check(
            self._cudnn.cudnnSetRNNDataDescriptor(
                self._rows, of_type, int(row["packed"]), row["length"], row["batch"], row["width"], lengths,
                ctypes.byref(filling),
            )
        )  # fmt: skip
        scratch, reserve = ctypes.c_size_t(), ctypes.c_size_t()
        has_failed = self._cudnn.cudnnGetRNNTempSpaceSizes(
            self._handle, self._layer, int(row["trains"]), self._rows, ctypes.byref(scratch), ctypes.byref(reserve)
        )  # fmt: skip
        return None if has_failed else (scratch.value, reserve.value)


def _check(status: int) -> None:
    if status:
        raise SystemExit(f"cuDNN said {status}")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.zeros(1, device="cuda")  # a context
    library = cudnn.installed()
    if library is None:
        parser.exit(1, f"cuDNN is not installed: {cudnn.ADVICE}\n")
    asker = Asker(ctypes.CDLL(str(library.path)))
    rows = []
    for values in itertools.islice(drawn(options.seed), COUNT):
        row = dict(zip(COLUMNS, values, strict=True))
        found = asker.ask(row)
        if found is not None:
            rows.append({**row, "scratch": found[0], "reserve": found[1]})
    right = sum(
        0 <= row["scratch"] - said_of(row)[0] <= LITTLE
        and (not row["trains"] or abs(row["reserve"] - said_of(row)[1]) <= LITTLE)
        for row in rows
    )
    print(f"{right} of {len(rows)} are as the rules say")
    document = {"asked": len(rows), "right": right, "seed": options.seed, "rows": rows[:KEPT]}
    write(options.out, "cudnn-layers", document, torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
