"""Advice on padding: only what was measured faster, and what it costs; from sizes or a trace."""

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pytracer
from benchmarks import models
from pytracer import cli, errors
from pytracer.lab.gemm import presets, report
from pytracer.lab.gemm.advice import Advice, advise, document, misaligned, uses
from pytracer.lab.gemm.shapes import CrossEntropy, Gemm, Work
from pytracer.lab.gemm.timer import EVEN, Comparison, Measure, Pace, Timing
from pytracer.lab.gemm.traced import linear_layers


def fake(seconds: Callable[[Work], float], noise: float = 0.002, bias: float = 0.0) -> Measure:
    """A device on which a product takes as long as a rule says, a little noisily."""
    draw = random.Random(0)

    def measure(works: Sequence[Work], *, null: bool = False, pace: Pace = EVEN) -> Comparison:
        def timing(work: Work, factor: float = 1.0) -> Timing:
            samples = (seconds(work) * factor * draw.gauss(1, noise) for _ in range(22))
            return Timing(work, tuple(samples))

        again = timing(works[0], 1 + bias) if null else None
        return Comparison(tuple(timing(work) for work in works), again)

    return measure


def like_hopper(work: Work) -> float:
    """Seven times as long where an operand is less than 16 bytes aligned, as on an H200."""
    if isinstance(work, CrossEntropy):
        return work.bytes / 4e12
    slow = min(work.alignment.values()) < 16
    return work.flops / (100e12 if slow else 700e12)


def like_nothing(work: Work) -> float:
    """A device that does not care: more elements take longer."""
    return work.bytes / 4e12 if isinstance(work, CrossEntropy) else work.flops / 500e12


GPT2 = presets.described("gpt2", "bf16", {"batch": 16, "seq": 1024})


def of(found: Advice, name: str) -> Any:
    return next(one for one in found.dimensions if one.name == name)


def test_an_odd_vocabulary_is_to_be_padded() -> None:
    """To the smallest of the sizes that are as good as the best."""
    found = advise(GPT2, fake(like_hopper))
    assert [one.name for one in found.dimensions] == ["vocab"]
    vocab = of(found, "vocab")
    assert vocab.advised.value == 50264
    assert [one.value for one in vocab.candidates] == [50264, 50272, 50304, 50432]
    assert "2 bytes aligned" in vocab.reason


def test_the_gain_is_what_the_step_saves() -> None:
    """All three products of the head and the loss, with an interval that holds the truth."""
    found = advise(GPT2, fake(like_hopper))
    padded = GPT2.with_size("vocab", 50264)
    true = sum(use.count * like_hopper(use.work) for use in uses(GPT2))
    true -= sum(use.count * like_hopper(use.work) for use in uses(padded))
    gain = of(found, "vocab").advised.gain
    assert gain.low <= true <= gain.high
    assert gain.median == pytest.approx(true, rel=0.01)
    assert gain.noise < 0.01


def test_nothing_is_advised_that_was_not_measured_faster() -> None:
    """On a device that does not care, an odd vocabulary stays, and the report says why."""
    found = advise(GPT2, fake(like_nothing))
    vocab = of(found, "vocab")
    assert vocab.advised is None
    assert not any(one.faster for one in vocab.candidates)
    assert "none of 50264, 50272, 50304, 50432 is proven faster" in vocab.reason
    assert "not proven faster" in report.advice_text(found)


def test_a_gain_within_the_measurements_own_bias_is_no_gain() -> None:
    """1 % faster, measured with a null that is 2 % off."""

    def slightly(work: Work) -> float:
        odd = isinstance(work, Gemm) and min(work.alignment.values()) < 16
        return like_nothing(work) * (1.01 if odd else 1.0)

    assert of(advise(GPT2, fake(slightly, 0.0005, bias=0.0)), "vocab").advised is not None
    doubtful = advise(GPT2, fake(slightly, 0.0005, bias=0.02))
    assert of(doubtful, "vocab").advised is None
    line = next(x for x in report.advice_text(doubtful).splitlines() if x.lstrip()[:5] == "50264")
    assert "not proven faster saves" in line
    assert "within the bias of up to" in line


def test_a_multiple_of_8_that_does_not_help_is_said_so() -> None:
    """Where only 128 bytes help, the smaller paddings are said not to be proven."""

    def picky(work: Work) -> float:
        odd = isinstance(work, Gemm) and min(work.alignment.values()) < 128
        return like_nothing(work) * (2 if odd else 1)

    vocab = of(advise(GPT2, fake(picky)), "vocab")
    assert vocab.advised.value == 50304
    assert vocab.reason.endswith("50304 was measured faster, of 50264, 50272 that is not proven")


def test_an_aligned_model_has_nothing_to_gain() -> None:
    """Every size a multiple of 128 bytes: nothing is tried, and the text says so."""
    found = advise(GPT2.with_size("vocab", 50304), fake(like_hopper))
    assert found.dimensions == ()
    assert "Nothing to pad" in report.advice_text(found)
    assert len(found.products) == 16  # five layers' three products, and the loss


def test_products_are_ranked_by_the_time_they_lose() -> None:
    """Against the best rate that was measured: the odd head before everything else."""
    found = advise(GPT2, fake(like_hopper))
    assert found.best_tflops == pytest.approx(700, rel=0.02)
    lost = [found.lost(*pair) for pair in found.products]
    assert lost == sorted(lost, reverse=True)
    assert [use.layer for use, _ in found.products[:3]] == ["head"] * 3
    odd = next(use for use in uses(GPT2) if use.layer == "head" and use.role == "forward")
    share = sum(lost[:3]) / (3 * odd.work.flops * (1 / 100e12 - 1 / 700e12))
    assert share == pytest.approx(1, rel=0.05)


def test_what_padding_costs_is_said_by_category() -> None:
    """47 rows of 768 float32 parameters with gradients and Adam's moments, 47 columns of logits."""
    found = advise(GPT2, fake(lambda work: like_hopper(work) if _aligned(work) else 1.0))
    advised = of(found, "vocab").advised
    assert advised.value == 50304
    parameters = 47 * 768
    assert advised.added_bytes == {
        "weights": parameters * 4,
        "gradients": parameters * 4,
        "optimizer_state": parameters * 8,
        "activations": 47 * 16 * 1024 * (2 + 4),
    }


def _aligned(work: Work) -> bool:
    return isinstance(work, CrossEntropy) or min(work.alignment.values()) == 128


def test_an_embedding_of_its_own_grows_too() -> None:
    """Llama's is not tied to the head: twice the parameters."""
    llama = presets.MODELS["llama-3-8b"]
    wider = llama.with_size("vocab", 128512)
    assert wider.parameters - llama.parameters == 2 * 256 * 4096


def test_tokens_are_a_size_too() -> None:
    """1023 tokens: batch times sequence is what a weight's gradient sums over."""
    model = presets.described("bert-large", "bf16", {"batch": 3, "seq": 1023, "vocab": 30528})
    assert misaligned(model).keys() == {"seq"}
    found = advise(model, fake(like_nothing))
    assert of(found, "seq").advised is None
    assert all(3 * one.value % 64 == 0 for one in of(found, "seq").candidates)


def test_fp8_sizes_that_cannot_be_are_refused_with_the_nearest() -> None:
    """50257 has no fp8 product at all."""
    with pytest.raises(errors.UsageError, match="nearest: 50256, 50272"):
        advise(dataclasses.replace(GPT2, dtype="fp8"), fake(like_hopper))


def test_a_size_that_could_not_be_measured_is_said_so() -> None:
    """The rest of the advice is not lost for it."""

    def short_of_memory(
        works: Sequence[Work], *, null: bool = False, pace: Pace = EVEN
    ) -> Comparison:
        if len(works) > 1:
            raise errors.PytracerError("out of memory for all that")
        return fake(like_hopper)(works, null=null)

    found = advise(GPT2, short_of_memory)
    assert of(found, "vocab").advised is None
    assert "was not measured: out of memory" in of(found, "vocab").reason
    assert len(found.products) == 16


def test_the_whole_steps_share_is_said_where_the_step_is_known() -> None:
    """In the text and in the document."""
    found = advise(dataclasses.replace(GPT2, step_seconds=0.1), fake(like_hopper))
    assert "of the step" in report.advice_text(found)
    candidate = document(found)["dimensions"][0]["candidates"][0]
    gain = candidate["gain_ms_per_step"]["median"]
    assert candidate["gain_of_step"] == pytest.approx(gain / 100)
    json.dumps(document(found))


def test_products_are_measured_as_they_will_run() -> None:
    """What torch.compile pads by itself is not ours to promise, nor what another library does."""
    seen: list[Work] = []

    def watched(works: Sequence[Work], *, null: bool = False, pace: Pace = EVEN) -> Comparison:
        seen.extend(works)
        return fake(like_hopper)(works, null=null)

    advise(GPT2, watched, compiled=True, library="cublaslt")
    products = [work for work in seen if isinstance(work, Gemm)]
    assert all(work.compiled and work.library == "cublaslt" for work in products)


@pytest.mark.parametrize("name", presets.MODELS)
def test_known_models_have_the_parameters_they_are_known_for(name: str) -> None:
    """Within 15 %: norms, positions and biases are not linear layers."""
    known = {
        "gpt2": 124e6,
        "gpt2-medium": 355e6,
        "gpt2-large": 774e6,
        "gpt2-xl": 1558e6,
        "bert-base": 110e6,
        "bert-large": 335e6,
        "llama-2-7b": 6.74e9,
        "llama-3-8b": 8.03e9,
    }
    assert presets.MODELS[name].parameters == pytest.approx(known[name], rel=0.05)


# ---------------------------------------------------------------------- from a trace


def traced(path: Path, *, autocast: bool, batch: int = 3, length: int = 31) -> Path:
    config = dataclasses.replace(models.TINY, vocabulary=257)
    model = models.Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(257, (batch, length))
    with pytracer.trace(model, optimizer, table=False) as t:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(ids, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return t.save(path)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_trace_shows_its_linear_layers(tmp_path: Path, autocast: bool) -> None:
    """Names, sizes, how often, how many rows, and what is the output layer, though it is tied."""
    path = traced(tmp_path / "run.pytrace", autocast=autocast)
    found = linear_layers(pytracer.load(path).data)
    assert [(one.name, one.out, one.inner, one.count, one.loss) for one in found.layers] == [
        ("blocks.*.attention.qkv", 192, 64, 2, False),
        ("blocks.*.attention.out", 64, 64, 2, False),
        ("blocks.*.mlp.up", 256, 64, 2, False),
        ("blocks.*.mlp.down", 64, 256, 2, False),
        ("head", 257, 64, 1, True),
    ]
    assert (found.batch, found.seq, found.rows) == (3, 31, 93)
    assert found.itemsize == (2 if autocast else 4)
    assert found.parameter_itemsize == 4
    assert (found.trained, found.gradient_bytes, found.state_bytes) == (True, 4, 8)
    assert found.step_seconds is not None
    assert found.device == "cpu"


def test_the_layers_of_a_sequential_are_named_by_their_numbers() -> None:
    sizes = ((8, 16), (16, 16), (16, 16), (16, 4))
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
    with pytracer.trace(model, table=False) as t:
        model(torch.randn(32, 8)).sum().backward()
    found = linear_layers(t.data).layers
    assert [(one.name, one.count) for one in found] == [("[0]", 1), ("[1, 2]", 2), ("[3]", 1)]


class Attention(torch.nn.Module):
    """Torch's own, which uses the weights of its parts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.att = torch.nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.att(x, x, x, need_weights=False)[0]
        return out


@pytest.mark.parametrize("head", [False, True], ids=["alone", "with a head"])
def test_both_products_of_an_attention_are_layers(head: bool) -> None:
    model = torch.nn.Sequential(Attention(), *([torch.nn.Linear(32, 50)] if head else []))
    with pytracer.trace(model, table=False) as t:
        model(torch.randn(4, 16, 32)).sum().backward()
    found = linear_layers(t.data)
    assert found.rows == 64
    products = [("*.att.in_proj", 96), ("*.att.out_proj", 32), ("[1]", 50)]
    assert [(one.name, one.out) for one in found.layers] == products[: 2 + head]


def test_a_model_of_a_trace_is_that_model(tmp_path: Path) -> None:
    """Advice for a trace names the output layer's size, and uses the time of the traced step."""
    found = linear_layers(pytracer.load(traced(tmp_path / "t.pytrace", autocast=True)).data)
    model = presets.traced(found, None, "cpu")
    assert (model.dtype, model.rows, model.step_seconds) == ("bf16", 93, found.step_seconds)
    told: list[str] = []
    advice = advise(model, fake(like_hopper), progress=told.append)
    assert of(advice, "257").advised.value == 264
    text = report.advice_text(advice)
    assert text.startswith("traced in bf16: batch 3, seq 31, sizes 192, 64, 256, 257\n")
    assert "\nsize 257: rows of bf16 are 2 bytes aligned" in text
    assert "padding size 257: head, loss" in told
    elsewhere = presets.traced(found, "bf16", "cuda")
    assert elsewhere.step_seconds is None
    assert any("traced on cpu" in note for note in elsewhere.notes)


def test_of_an_evaluation_only_forward_products_are_measured() -> None:
    """And padding costs no gradients and no optimizer state there."""
    layer = torch.nn.Linear(64, 33)
    with pytracer.trace(layer, table=False) as t, torch.no_grad():
        layer(torch.randn(64, 64))
    model = presets.traced(linear_layers(t.data), "bf16", "cpu")
    assert [use.role for use in uses(model)] == ["forward"]
    advice = advise(model, fake(like_hopper))
    (found,) = advice.dimensions
    added = found.candidates[0].added_bytes
    assert added["weights"] > 0
    assert added["gradients"] == added["optimizer_state"] == 0
    assert "no backward" in report.advice_text(advice)


def test_a_trace_without_linear_layers_is_refused() -> None:
    """With what is needed instead."""
    with pytracer.trace(table=False) as t:
        torch.ones(10) + 1
    with pytest.raises(errors.UsageError, match="no linear layer"):
        linear_layers(t.data)


def test_rows_that_a_trace_does_not_show_exactly_are_asked_for() -> None:
    """Two different batches in one step have no one number of rows."""
    layer = torch.nn.Linear(8, 8)
    with pytracer.trace(layer, table=False) as t:
        (layer(torch.randn(5, 8)).sum() + layer(torch.randn(7, 8)).sum()).backward()
    with pytest.raises(errors.UsageError, match="--batch and --seq"):
        linear_layers(t.data)
    assert linear_layers(t.data, rows=5).layers[0].count == 1


# ---------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("sweep --n 0", 2, "whole numbers from 1"),
        ("sweep --n -8", 2, "whole numbers from 1"),
        ("sweep --k x", 2, "is no size"),
        ("sweep --dtype bf15", 2, "--dtype 'bf15'"),
        ("sweep --device cpu --dtype fp8", 1, "does not multiply fp8"),
        ("sweep --batch 0", 2, "--batch 0"),
        ("sweep --roles up", 2, "--roles 'up'"),
        ("sweep --m 1,2 --around waves", 2, "one size each"),
        ("sweep --device cpu --m 1000000 --n 1000000 --dtype fp32", 1, "has room for"),
        ("sweep --device cpu --m 32 --dtype int8 --n 12", 2, "multiples of 8"),
        ("sweep --library mkl", 2, "--library 'mkl'"),
        ("sweep --device cpu --library cublas", 2, "cpu has one library"),
        ("sweep --plot a.gif", 2, ".png or a .svg"),
        ("find-peak --device banana", 2, "no device"),
        ("advise", 2, "--vocab --hidden --batch --seq missing"),
        ("advise --model gpt9", 2, "no model 'gpt9'"),
        ("advise --model gpt2 --seq 0", 2, "--seq is 0"),
        ("advise nowhere.pytrace", 4, "no such file"),
        ("advise some.pytrace --model gpt2", 2, "not both"),
        ("advise some.pytrace --ffn 64 --layers 3", 2, "leave out --ffn --layers"),
        ("advise some.pytrace --batch 8", 2, "--batch and --seq go together"),
        ("advise some.pytrace --seq 8", 2, "--batch and --seq go together"),
        ("advise some.pytrace --batch 0 --seq 8", 2, "--batch is 0"),
    ],
)
def test_errors_are_one_clear_line(
    words: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong and what to do, and the exit code that says which kind."""
    assert cli.main(["gemm", *words.split()]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("pytracer: ")
    assert error.count("\n") == 1


def test_a_missing_subcommand_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """As argparse has it: exit code 2."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["gemm"])
    assert caught.value.code == 2
    assert "WHAT" in capsys.readouterr().err


SMALL = "--device cpu --dtype fp32 --seconds 0.2"


def test_a_sweep_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table for people, progress on stderr, the document in a file that is not overwritten."""
    target = tmp_path / "sweep.json"
    words = f"gemm sweep {SMALL} --m 32,64 --n 32 --k 32 --roles forward -o {target}".split()
    assert cli.main(words) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[0].split()[:4] == ["m", "n", "k", "dtype"]
    assert "fp32 calibration" in output.err
    saved = json.loads(target.read_text())
    rows = saved["groups"][0]["rows"]
    assert [(row["m"], row["role"]) for row in rows] == [(32, "forward"), (64, "forward")]
    assert saved["device"]["kind"] == "cpu"
    assert rows[0]["predicted_microseconds"] > 0
    assert cli.main(words) == 1
    assert "-f replaces it" in capsys.readouterr().err


@pytest.mark.ci
def test_advice_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON document on stdout, whatever the verdict is on this machine."""
    words = f"gemm advise {SMALL} --vocab 33 --hidden 32 --batch 2 --seq 16 --layers 1 --json"
    assert cli.main(words.split()) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["pytracer_json"] == cli.output.JSON_VERSION
    assert answer["model"]["sizes"]["vocab"] == 33
    (vocab,) = answer["dimensions"]
    assert (vocab["name"], vocab["value"]) == ("vocab", 33)
    measured = {one["value"]: one for one in vocab["candidates"]}
    assert measured.keys() == {36, 40, 48, 64}
    assert vocab["advised"] is None or measured[vocab["advised"]]["faster"]


@pytest.mark.cuda
def test_gpu_advice_on_an_odd_vocabulary() -> None:
    """On Hopper: pad, to a multiple of 8 or better, and the padded model has nothing left."""
    from pytracer.lab.gemm.timer import Settings, Timer

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a device on which 16 bytes matter")
    timer = Timer(torch.device("cuda"), Settings(seconds=0.1))
    model = presets.described("gpt2", "bf16", {"batch": 4, "seq": 1024})
    vocab = of(advise(model, timer), "vocab")
    assert vocab.advised is not None
    assert vocab.advised.value % 8 == 0
    assert advise(model.with_size("vocab", 50304), timer).dimensions == ()
