"""Ranks that may do something else than the imagined one widen its verdict, or end it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pytracer
from pytracer.analysis.facts.doubts import doubts
from pytracer.cli import main
from pytracer.imagined import others

START = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = dist.get_rank()


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))

    def forward(self, x, at):
        return self.parts[at](x)


def train(model, at, steps=2):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(4, 512, device="cuda"), at).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


"""
WRAPPED = (
    "model = nn.parallel.DistributedDataParallel(Parts().cuda(), find_unused_parameters=True)\n"
)
BACKWARD = 1 + START[: START.index(".backward()")].count("\n")
WEIGHTS = 4 * 512 * 513


def answers(
    script: Path, text: str, capsys: pytest.CaptureFixture[str], *options: str, ranks: int = 2
) -> list[dict[str, Any]]:
    script.write_text(START + text)
    main(["imagine", "--on", "H100", "--ranks", str(ranks), "--json", *options, str(script)])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["cards"]
    return found


@pytest.mark.ci
def test_gradients_of_other_ranks_make_an_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank uses another part, so each has the gradient and the state of both; one stands for both."""
    script = tmp_path / "train.py"
    program = f"{WRAPPED}train(model, rank)\n"
    (first,) = answers(script, program, capsys)
    assert (first["verdict"], first["basis"]) == ("fits", "interval")
    more = first["peak_at_most"] - first["peak"]
    assert more == 4 * WEIGHTS, "a gradient, two states and a temporary"
    for said, peak in (("true", first["peak_at_most"]), ("false", first["peak"])):
        assumed = ("--rank", "0", "--assume", f"train.py:{BACKWARD}={said}")
        (stated,) = answers(script, program, capsys, *assumed)
        assert (stated["peak"], stated["basis"]) == (peak, "exact")


def test_left_out_parameters_are_a_doubt_in_python() -> None:
    """The reason names the line and what to say. With that said there is no doubt."""

    def left_out(assume: dict[str, bool] | None) -> Any:
        with pytracer.imagine("H100", ranks=2, assume=assume) as t:
            dist.init_process_group("nccl")
            parts = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("used", "left")}).cuda()
            parts.forward = lambda x: parts["used"](x)  # type: ignore[method-assign]
            model = nn.parallel.DistributedDataParallel(parts, find_unused_parameters=True)
            model(torch.ones(4, 64, device="cuda")).sum().backward()
        return t

    (reason,) = doubts(left_out(None).data)
    line = reason.partition(": ")[0]
    assert line.startswith("tests/test_imagine_others.py:")
    assert f"--assume {line}=true" in reason
    for used in (False, True):
        t = left_out({line: used})
        assert not doubts(t.data)
        assert t.summary().loc["gradients", "at_end"] == (1 + used) * 4 * 64 * 65


@pytest.mark.ci
def test_a_decision_by_what_ranks_say_needs_the_same_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the verdict is not known, until the outcome is stated."""
    script = tmp_path / "train.py"
    program = "total = torch.tensor([{value}])\ndist.all_reduce(total)\n"
    program += "if total.item() < 1000:\n    train(Parts().cuda(), 0)\n"
    differ = answers(script, program.format(value="rank"), capsys)
    assert {one["verdict"] for one in differ} == {"not known"}
    assert "rank 1 says something else than rank 0" in differ[0]["why"][0]
    line = 1 + (START + program).partition("if total")[0].count("\n")
    assumed = ("--assume", f"train.py:{line}=true")
    (stated,) = answers(script, program.format(value="rank"), capsys, *assumed)
    assert stated["verdict"] == "fits"


def rank(number: int, more: int) -> Any:
    """A trace of one of 16 ranks, which does something `more` times more."""
    with pytracer.imagine("H100", ranks=16, rank=number) as t:
        dist.init_process_group("nccl")
        x = torch.ones(64, 64, device="cuda", requires_grad=True)
        for _ in range(1 + more):
            x = x * 2
        x.sum().backward()
        if number == 0:
            x.detach().mean()  # what only the first rank logs
    return t.data


def test_ranks_that_run_the_same_stand_for_each_other() -> None:
    first, last, other = rank(1, 0), rank(15, 0), rank(15, 1)
    assert others.stands_for(first, last)
    assert not others.are_alike(first, other)
    assert others.several(4) == [0, 1, 2, 3]
    assert others.several(16) == [0, 1, 8, 15]


@pytest.mark.parametrize(
    ("more", "known"), [((1, 0, 0, 0), True), ((0, 0, 1, 2), False), ((0, 0, 0, 1), False)]
)
def test_a_few_ranks_stand_for_many_if_they_are_alike(more: Any, known: bool) -> None:
    """The first may be another one. Otherwise the ranks between them are not known, and it is said."""
    reason = others.of_some([rank(*each) for each in zip(others.several(16), more, strict=True)])
    assert bool(reason) != known
    assert known or "ranks 0, 1, 8, 15 run different programs" in reason
