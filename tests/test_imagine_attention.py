"""Attention, and some other operators, take on a card the bytes that were measured on one."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import pytracer
from benchmarks import attention as measured
from tests.imagined_oracle import compare, peaks
from tests.tiers import first_of

FILE = Path(measured.ROOT, "benchmarks/results/attention-nvidia-h100-80gb-hbm3.json")
ROWS: dict[str, dict[str, Any]] = json.loads(FILE.read_text())["rows"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # scratch is for each thread
    gc.collect()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("start", first_of(range(8), 1, later=pytest.mark.nightly))
def test_each_measured_row_is_held(start: int) -> None:
    """What is kept and the peaks of forward and backward are equal, or inside of the interval."""
    names = list(ROWS)[start::8]
    real = {name: ROWS[name] for name in names}
    assert not list(measured.differing(real, measured.imagine("H100", names)))


def test_cudnns_attention_is_measured_to_the_byte() -> None:
    """On the measured architecture it is no interval; on the next one it is."""
    names = [name for name in ROWS if ROWS[name]["backend"] == "cudnn"][::9]
    assert not any("more" in row for row in measured.imagine("H100", names).values())
    assert any("more" in row for row in measured.imagine("B200", names).values())


def chosen(card: str, dtype: torch.dtype, *, masked: bool = False, grad: bool = False) -> str:
    """The kernel."""
    with pytracer.imagine(card) as t:
        parts = (torch.randn(2, 4, 64, 32, device="cuda", dtype=dtype) for _ in range(3))
        query, key, value = (one.requires_grad_() for one in parts)
        mask = None
        if masked:
            mask = torch.zeros(64, 64, device="cuda", dtype=dtype, requires_grad=grad)
        functional.scaled_dot_product_attention(query, key, value, mask).sum().backward()
    ops = {str(op) for op in t.allocations()["op"].dropna()}
    return next(kind for kind in ("cudnn", "flash", "efficient", "math") if kind in str(ops))


def test_the_card_decides_which_kernel_comes_first() -> None:
    """cuDNN's on Hopper and Blackwell, then flash, which takes no mask, then memory-efficient."""
    half = torch.bfloat16
    assert chosen("H100", half) == chosen("H100", half, masked=True) == "cudnn"
    assert chosen("B200", half) == "cudnn"
    assert chosen("A100", half) == chosen("RTX5090", half) == "flash"
    assert chosen("A100", half, masked=True) == "efficient"
    assert chosen("H100", half, masked=True, grad=True) == "efficient"
    assert chosen("H100", torch.float32) == "efficient"
    assert chosen("T4", torch.float16) == "efficient"


def test_the_program_and_its_environment_may_prefer_another_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a context, by an order, or by TORCH_CUDNN_SDPA_DEPRIORITIZED."""
    half = torch.bfloat16
    order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(order, set_priority=True):
        assert chosen("H100", half) == "efficient"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert chosen("H100", half) == "flash"
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert chosen("A100", half) == "cudnn"
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert chosen("H100", half) == "flash"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["", "bool", "float", "causal", "groups", "no gradients"])
def test_the_plain_kernel_takes_what_it_really_takes(dtype: torch.dtype, kind: str) -> None:
    """Its softmax takes scratch, and the mask is added in place: also the peak is that of a real run."""

    def program() -> None:
        grad, many = kind != "no gradients", 2 if kind == "groups" else 4
        query = torch.ones(2, 4, 33, 16, dtype=dtype, requires_grad=grad)
        key, value = (torch.ones(2, many, 33, 16, dtype=dtype, requires_grad=grad) for _ in "kv")
        mask = None
        if kind == "bool":
            mask = torch.ones(33, 33, dtype=torch.bool).tril()
        elif kind == "float":
            mask = torch.ones(2, 1, 33, 33, dtype=dtype)
        with sdpa_kernel(SDPBackend.MATH):
            result = functional.scaled_dot_product_attention(
                query, key, value, mask, 0.0, kind == "causal", enable_gqa=many == 2
            )
        if grad:
            result.sum().backward()

    with pytracer.trace(devices="cpu", table=False) as real:
        program()
    gc.collect()
    with pytracer.imagine("cpu") as imagined:
        program()
    found = compare(real.data, imagined.data)
    assert not found.invented
    assert not found.missing
    assert peaks(real.data) == peaks(imagined.data)
    assert real.peak.bytes == imagined.peak.bytes
