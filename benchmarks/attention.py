"""Measures what attention, CTC losses and some other operators take on a card, and imagines the same.

    python benchmarks/attention.py --out benchmarks/results            # needs a GPU, a minute
    python benchmarks/attention.py --beside benchmarks/results/FILE    # needs none

Each row is one call, forward and backward: the kernel that torch chose, the bytes that it keeps for
backward, and the two peaks. `--beside` imagines the rows of a file and prints those that differ.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from benchmarks import slug  # noqa: E402

BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable", -1: "none"}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Row(NamedTuple):
    """One call of `scaled_dot_product_attention`."""

    dtype: str
    length: int
    keys: int
    head: int
    mask: str = ""  # causal, bool, float, or float-heads: one per head
    groups: int = 1  # heads of the query for each of the keys
    dropout: float = 0.0
    grad: bool = True
    only: str = ""  # the one kernel that is allowed
    mask_grad: bool = False


def rows() -> Iterator[Row]:
    """All rows."""
    for dtype in DTYPES:
        for length in (512, 511):
            for mask in ("", "causal", "bool", "float", "float-heads"):
                yield Row(dtype, length, length, 64, mask)
        for head in (40, 80, 100, 128, 192, 256):
            yield Row(dtype, 256, 256, head)
            yield Row(dtype, 256, 256, head, "float")
        for mask in ("", "causal", "bool", "float"):
            yield Row(dtype, 256, 256, 64, mask, groups=4)
            yield Row(dtype, 256, 256, 64, mask, grad=False)
            yield Row(dtype, 256, 256, 64, mask, only="math")
            yield Row(dtype, 256, 255, 64, mask)
            yield Row(dtype, 1, 256, 64, mask, grad=False)
            yield Row(dtype, 256, 256, 64, mask, dropout=0.1)
        yield Row(dtype, 256, 256, 64, dropout=0.125)
        yield Row(dtype, 256, 1, 64)
        yield Row(dtype, 256, 256, 64, "float", mask_grad=True)
        yield Row(dtype, 2, 300, 64, "bool")
        yield Row(dtype, 300, 2, 64)
        yield from _of_one_kernel(dtype)


def _of_one_kernel(dtype: str) -> Iterator[Row]:
    for length in (512, 511, 320, 200, 1000):
        for head in (40, 64, 80, 128, 192):
            for mask in ("", "bool", "float"):
                yield Row(dtype, length, length, head, mask, only="efficient")
            if dtype != "float32":
                yield Row(dtype, length, length, head, only="flash")
    yield Row(dtype, 200, 500, 64, only="efficient")
    yield Row(dtype, 500, 200, 64, only="efficient")
    yield Row(dtype, 256, 256, 64, dropout=0.1, only="efficient")
    if dtype != "float32":
        yield Row(dtype, 256, 256, 100, only="flash")
        yield Row(dtype, 256, 256, 64, groups=4, only="flash")
        yield Row(dtype, 256, 256, 64, dropout=0.1, only="flash")
        yield Row(dtype, 256, 256, 64, grad=False, only="flash")


def attention(row: Row) -> dict[str, Any]:
    """Runs the row, on the card or on an imagined one."""
    dtype, batch, heads = DTYPES[row.dtype], 4, 8

    def part(length: int, many: int) -> torch.Tensor:
        made = torch.zeros(batch, length, many, row.head, dtype=dtype, device="cuda")
        return made.requires_grad_(row.grad)

    def run() -> tuple[Any, int]:
        few = heads // row.groups
        parts = (part(row.length, heads), part(row.keys, few), part(row.keys, few))
        query, key, value = (one.transpose(1, 2) for one in parts)
        mask = _mask(row, dtype, batch, heads)
        options: dict[str, Any] = {"dropout_p": row.dropout, "is_causal": row.mask == "causal"}
        options["enable_gqa"] = row.groups > 1
        chosen = -1
        if not _is_imagining():
            chosen = torch._fused_sdp_choice(query, key, value, mask, **options)
        return lambda: functional.scaled_dot_product_attention(
            query, key, value, mask, **options
        ), chosen

    allowed = _ALLOWED[row.only]
    with sdpa_kernel(allowed):
        return measured(run, backward=row.grad)


_ALLOWED = {
    "math": [SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "": [
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ],
}


def _mask(row: Row, dtype: torch.dtype, batch: int, heads: int) -> torch.Tensor | None:
    shape: tuple[int, ...] = (row.length, row.keys)
    if row.mask == "bool":
        return torch.ones(shape, dtype=torch.bool, device="cuda")
    if row.mask in ("float", "float-heads"):
        shape = (batch, 1 if row.mask == "float" else heads, *shape)
        return torch.zeros(shape, dtype=dtype, device="cuda", requires_grad=row.mask_grad)
    return None


def ctc(length: int, classes: int, labels: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """A CTC loss: cuDNN's, if the targets are 32-bit numbers."""

    def run() -> tuple[Any, int]:
        scores = torch.zeros(length, 8, classes, device="cuda", requires_grad=True)
        targets = torch.ones(8 * labels, dtype=dtype, device=device)
        many: Any = ((length,) * 8, (labels,) * 8)
        if device == "cuda":
            many = tuple(torch.tensor(one, dtype=dtype, device="cuda") for one in many)
        return lambda: functional.ctc_loss(scores.log_softmax(2), targets, *many), -1

    return measured(run, backward=True)


def grouped(dtype: torch.dtype, rows_: int, width: int) -> dict[str, Any]:
    """A product of groups."""

    def run() -> tuple[Any, int]:
        a = torch.zeros(rows_, width, dtype=dtype, device="cuda", requires_grad=True)
        b = torch.zeros(8, width, width, dtype=dtype, device="cuda", requires_grad=True)
        ends = torch.arange(1, 9, dtype=torch.int32, device="cuda") * (rows_ // 8)
        return lambda: torch._grouped_mm(a, b, offs=ends), -1

    return measured(run, backward=True)


def normalized(dtype: torch.dtype) -> dict[str, Any]:
    """`rms_norm`, which is one kernel on a card."""

    def run() -> tuple[Any, int]:
        x = torch.zeros(4096, 512, dtype=dtype, device="cuda", requires_grad=True)
        weight = torch.zeros(512, dtype=dtype, device="cuda", requires_grad=True)
        return lambda: functional.rms_norm(x, (512,), weight), -1

    return measured(run, backward=True)


def activated(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """An activation, which is one kernel on a card."""

    def run() -> tuple[Any, int]:
        x = torch.zeros(4096, 512, dtype=dtype, device="cuda", requires_grad=True)
        return lambda: getattr(functional, name)(x), -1

    return measured(run, backward=True)


def others() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Rows of other operators, by name."""
    for length, classes, labels in ((100, 50, 10), (400, 1000, 40), (800, 5000, 100)):
        for dtype, device in ((torch.long, "cuda"), (torch.int32, "cpu"), (torch.int32, "cuda")):
            name = f"ctc {length} {classes} {labels} {slug(str(dtype))} {device}"
            yield name, lambda a=(length, classes, labels, dtype, device): ctc(*a)
    for name, dtype in DTYPES.items():
        for rows_ in (1024, 8192):
            yield f"grouped {name} {rows_}", lambda a=(dtype, rows_, 512): grouped(*a)
        yield f"rms_norm {name}", lambda a=dtype: normalized(a)
        for one in ("silu", "mish", "gelu", "logsigmoid"):
            yield f"{one} {name}", lambda a=(one, dtype): activated(*a)


# ---------------------------------------------------------------- measuring


def measured(run: Callable[[], tuple[Any, int]], *, backward: bool) -> dict[str, Any]:
    """The peaks of forward and of both, and what is kept between: bytes beyond the inputs."""
    _warm_up()
    call, chosen = run()
    before = _requested("current")
    if not _is_imagining():
        torch.cuda.reset_peak_memory_stats()
    try:
        result = call()
    except RuntimeError as error:
        return {"problem": str(error).partition("\n")[0][:80]}
    found: dict[str, Any] = {"backend": BACKENDS.get(chosen, str(chosen))}
    found |= {"forward": _requested("peak") - before, "kept": _requested("current") - before}
    if backward:
        result.backward(torch.zeros_like(result))
        found["both"] = _requested("peak") - before
    return found


def _warm_up() -> None:
    """Takes the workspaces of cuBLAS, in forward and in backward."""
    x = torch.zeros(16, 16, device="cuda", requires_grad=True)
    functional.linear(x @ x, x, torch.zeros(16, device="cuda")).sum().backward()
    if not _is_imagining():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _requested(which: str) -> int:
    amount: int = torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]
    return amount


def _is_imagining() -> bool:
    module = sys.modules.get("pytracer")
    return bool(module and module.is_imagining())


def measure() -> dict[str, dict[str, Any]]:
    """All rows, by name."""
    found = {name_of(row): attention(row) for row in rows()}
    return found | {name: run() for name, run in others()}


def imagine(card: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Rows of these names on an imagined card."""
    import pytracer

    runs: dict[str, Callable[[], dict[str, Any]]] = {
        name_of(row): lambda row=row: attention(row) for row in rows()
    }
    runs |= dict(others())
    found = {}
    for name in names:
        with pytracer.imagine(card) as t:
            found[name] = runs[name]()
        most = t.data.meta["imagined"].get("peak_at_most")
        if most is not None:
            found[name]["more"] = most - t.peak.bytes
    return found


def name_of(row: Row) -> str:
    return "attention " + " ".join(f"{name}={value}" for name, value in row._asdict().items())


def differing(
    real: dict[str, dict[str, Any]], guess: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, str, int, int]]:
    """Name, quantity, and the measured and imagined bytes, where the interval does not hold."""
    for name, found in real.items():
        for quantity in ("kept", "forward", "both"):
            if quantity not in found:
                continue
            imagined = guess[name].get(quantity, -1)
            more = 0 if quantity == "kept" else guess[name].get("more", 0)
            if not imagined <= found[quantity] <= imagined + more:
                yield name, quantity, found[quantity], imagined


def _one_row_per_line(document: dict[str, Any]) -> str:
    found = document.pop("rows")
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in found.items())
    return f'{json.dumps(document, indent=1)[:-2]},\n "rows": {{\n{lines}\n }}\n}}\n'


def main() -> None:
    """Measures, or imagines beside a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the folder of results")
    parser.add_argument("--beside", type=Path, help="a file of results, to imagine beside")
    parser.add_argument("--card", default="H100")
    options = parser.parse_args()
    if options.beside is not None:
        document = json.loads(options.beside.read_text())
        for line in differing(document["rows"], imagine(options.card, document["rows"])):
            print(*line)
        return
    document = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "rows": measure(),
    }
    text = _one_row_per_line(document)
    if options.out is None:
        print(text)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"attention-{slug(document['device'])}.json").write_text(text)


if __name__ == "__main__":
    main()
