"""What a compiled program takes where it is imagined, which is what it takes where it runs."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pytracer
from pytracer.analysis.facts.doubts import doubts
from tests import compiled_models
from tests.imagined_oracle import _NUMBER, blocks, compare, peaks

# Torch's own: of a card that could multiply faster, and of Dynamo after a graph break.
pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]
_INDUCTOR, _AHEAD = {"backend": "inductor"}, {"backend": "aot_eager"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.reset()
    yield
    torch.set_num_threads(threads)
    torch.compiler.reset()
    gc.collect()


def train(model: str, how: dict[str, Any], device: str = "cpu", sizes: Any = (4, 4)) -> nn.Module:
    """Trains a compiled model for a step with each batch size."""
    torch.manual_seed(0)
    make, batch = compiled_models.MODELS[model]
    plain = make().to(device)
    run: Any = torch.compile(plain, **how)
    optimizer = torch.optim.AdamW([one for one in plain.parameters() if one.requires_grad])
    for size in sizes:
        run(batch(size).to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return plain


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("mlp", _AHEAD),
        ("mlp", _INDUCTOR),
        *(
            pytest.param(model, how, marks=pytest.mark.slow)
            for model in ("gpt", "breaks", "convolutions", "lora")
            for how in (_AHEAD, _INDUCTOR)
            if (model, how) != ("lora", _AHEAD)  # its peak has a number of Python, of 8 bytes
        ),
    ],
)
def test_compiled_code_takes_what_it_is_imagined_to_take(model: str, how: Any) -> None:
    """Block by block: the same step, phase, category, operator and bytes."""
    train(model, how)  # so the traced run compiles nothing
    with pytracer.trace(devices="cpu", table=False) as real:
        train(model, how)
    gc.collect()
    torch.compiler.reset()
    with pytracer.imagine("cpu") as imagined:
        train(model, how)
    found = compare(real.data, imagined.data)
    assert not found.invented
    # A graph that runs as it is passes numbers, of which torch makes tensors on the way.
    assert all(block.bytes <= _NUMBER for block in found.missing)
    assert peaks(real.data) == peaks(imagined.data)
    assert not doubts(imagined.data)


@pytest.mark.slow
def test_sizes_that_change_are_followed() -> None:
    """Then Inductor compiles for any size."""
    with pytracer.imagine("H100") as few:
        train("mlp", _INDUCTOR, "cuda", (4, 4, 4))
    with pytracer.imagine("H100") as many:
        train("mlp", _INDUCTOR, "cuda", (6, 4, 4))
    last = [
        {block: count for block, count in blocks(t.data).items() if block.step == 2}
        for t in (few, many)
    ]
    assert {b.bytes for b in last[0]} == {b.bytes for b in last[1]}


def test_a_compiled_optimizer_takes_what_it_is_imagined_to_take() -> None:
    """Dynamo makes its state while it traces the step."""

    def program() -> None:
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        step = torch.compile(optimizer.step)
        for _ in range(2):
            model(torch.randn(8, 64)).square().mean().backward()
            step()
            optimizer.zero_grad()

    with pytracer.imagine("cpu") as imagined:
        program()
    program()
    with pytracer.trace(devices="cpu", table=False) as real:
        program()
    assert peaks(imagined.data) == peaks(real.data)
    assert not doubts(imagined.data)


def test_a_card_needs_neither_triton_nor_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block has its line, and partitions save less than eager layers."""
    monkeypatch.setenv("PATH", "")
    with pytracer.imagine("H100", stacks=True) as plain:
        _steps(lambda model: model)
    with pytracer.imagine("H100", stacks=True) as t:
        _steps(torch.compile)
    assert all("may take another kernel" in one for one in doubts(t.data))
    assert compiled_models.shares(t, plain)["lines"] == 1
    assert 0 < t.peak.by_category["activations"] < plain.peak.by_category["activations"]


def _steps(compiled: Any) -> None:
    make, batch = compiled_models.MODELS["gpt"]
    model = make().to("cuda")
    run = compiled(model)
    for _ in range(2):
        run(batch(4).to("cuda")).backward()


def test_afterwards_torch_compiles_with_kernels_again() -> None:
    """Also what was compiled in the block, and the same code."""
    private: Any = torch._C._dynamo.guards  # type: ignore[attr-defined]
    before = private._empty_strided_cpu, torch.compile
    net = nn.Linear(8, 8)
    function = torch.compile(lambda x: net(x).exp() + 1)
    with pytracer.imagine("cpu"):
        function(torch.ones(4, 8))
    assert (private._empty_strided_cpu, torch.compile) == before
    x = torch.randn(4, 8)
    assert torch.allclose(function(x), net(x).exp() + 1)


def test_compiled_before_is_followed_too() -> None:
    """And runs with kernels again after the block."""
    function = torch.compile(lambda x: (x * 2).sin().sum())
    x = torch.randn(1000, requires_grad=True)
    expected = function(x)
    with pytracer.imagine("cpu") as t:
        function(torch.randn(1000, requires_grad=True)).backward()
    assert t.data.meta["imagined"]["not_followed"] == []
    assert "CompiledFunctionBackward" in " ".join(t.data.strings)
    assert torch.equal(function(x), expected)


def test_where_the_compiler_stops_the_code_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict is not known, and the reason is a sentence."""
    from torch._inductor.graph import GraphLowering

    def stop(*_: Any) -> None:
        raise RuntimeError("no such code\nat all")

    monkeypatch.setattr(GraphLowering, "codegen", stop)
    with pytracer.imagine("H100") as t:
        train("mlp", {"fullgraph": True}, "cuda")
    (why,) = (one for one in doubts(t.data) if "counted as eager" in one)
    assert "(InductorError: RuntimeError: no such code)" in why or "no such code" in why
    assert t.fits().verdict == "not known"
    assert t.peak.by_category["activations"] > 0


@pytest.mark.parametrize(
    ("mode", "said"),
    [("reduce-overhead", "CUDA graphs keep a pool"), ("max-autotune", "chosen by timing")],
)
def test_what_is_not_followed_is_said(mode: str, said: str) -> None:
    """The rest is: the plan of memory is there."""
    with pytracer.imagine("H100") as t:
        train("mlp", {"mode": mode}, "cuda")
    assert said in " ".join(doubts(t.data))


@pytest.mark.parametrize(
    ("is_compiled", "is_causal"), [(True, False), (True, True), (False, False)]
)
def test_the_kernel_of_compiled_attention_is_doubted(is_compiled: bool, is_causal: bool) -> None:
    """An H100 took plain products in BERT and in a ViT, which are not causal, in compiled code only."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(x, x, x, is_causal=is_causal)

    with pytracer.imagine("H100") as t:
        x = torch.randn(2, 4, 197, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        (torch.compile(attend) if is_compiled else attend)(x).sum().backward()
    assert bool(doubts(t.data)) == (is_compiled and not is_causal)


def test_padding_is_doubted_where_only_the_card_knows() -> None:
    """Inductor times products whose rows are no whole 16 bytes."""

    def step(columns: int) -> None:
        product = torch.compile(lambda x, w: x @ w)
        x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
        product(x, torch.randn(1024, columns, device="cuda", dtype=torch.bfloat16))

    with pytracer.imagine("H100") as odd:
        step(4097)
    assert "pads a product with an operand of 8.00 MiB" in " ".join(doubts(odd.data))
    with pytracer.imagine("H100") as whole:
        step(4096)
    assert not doubts(whole.data)
