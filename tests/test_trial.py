"""A plan that is tried on an unchanged program: the names of its modules, and what a wrong one does."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytracer import errors
from pytracer.recording.trial import Trial

ROOT = Path(__file__).parents[1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attn(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(x))


class Tried:
    """A trial, what it said, and a way to train models in it."""

    def __init__(self, checkpoint: Sequence[str], offload: Sequence[str] = ()) -> None:
        self.stopped: list[str] = []
        self.told: list[str] = []
        self.trial = Trial(checkpoint, offload, stop=self.stopped.append, tell=self.told.append)
        self.trial.begin()

    def train(self, *models: nn.Module) -> None:
        optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
        for _ in range(2):
            for model in models:
                model(torch.ones(2, 4)).sum().backward()
            optimizer.step()


@pytest.fixture
def tried() -> Iterator[Any]:
    """Makes trials, and ends them."""
    made: list[Tried] = []
    gc.collect()  # the models of the tests before

    def make(*arguments: Any) -> Tried:
        made.append(Tried(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.trial.end()


def changed(*models: nn.Module) -> list[str]:
    """The paths of the modules whose calls were changed."""
    return [
        path for model in models for path, one in model.named_modules() if "forward" in vars(one)
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["blocks.0"], ["blocks.0"]),
        (["blocks.1.mlp.0", "head"], ["blocks.1.mlp.0", "head"]),
        (["blocks.*"], ["blocks.0", "blocks.1", "blocks.2"]),
        (["blocks.*.attn"], ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]),
        (["Model.blocks.2"], ["blocks.2"]),
        (["head", "head"], ["head"]),
    ],
)
def test_right_names_change_these_modules_and_no_others(
    tried: Any, names: list[str], expected: list[str]
) -> None:
    model, one = Model(), tried(names)
    one.train(model)
    assert changed(model) == expected
    assert (one.stopped, one.told, one.trial.end()) == ([], [], "")


@pytest.mark.parametrize(
    ("names", "expected"), [(["[0]", "2"], ["0", "2"]), (["[*]"], ["0", "1", "2"])]
)
def test_the_children_of_a_sequential_have_the_names_that_tables_show(
    tried: Any, names: list[str], expected: list[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    one = tried(names)
    one.train(model)
    assert changed(model) == expected
    assert not one.stopped


def test_a_module_that_several_names_match_is_changed_once(tried: Any) -> None:
    model, one = Model(), tried(["blocks.*", "blocks.0", "*.0"])
    calls: list[int] = []
    plain = Block.forward
    model.blocks[0].forward = lambda x: calls.append(1) or plain(model.blocks[0], x)  # type: ignore[assignment]
    one.train(model)
    assert len(calls) == 4  # twice forward, twice to compute again


@pytest.mark.parametrize(
    ("names", "wrong", "question"),
    [
        (["nope"], ["--checkpoint nope"], "There are blocks, blocks.0, "),
        (["blocks.0", "heads"], ["--checkpoint heads"], "; did you mean 'head'?"),
        (
            ["Model.blocks.0", "Model.heads"],
            ["--checkpoint Model.heads"],
            "; did you mean 'Model.head'",
        ),
        (["attn", "blocks.0"], ["--checkpoint attn"], "'blocks.0.attn' or 'blocks.1.attn' or "),
        (["blocks.0", "x", "blocks.9", "y"], ["--checkpoint x", "--checkpoint blocks.9", "y"], ""),
        (["blocks.*.nope", "head"], ["--checkpoint blocks.*.nope"], ""),
        (["block.*"], ["--checkpoint block.*"], "did you mean 'blocks."),
    ],
)
def test_a_wrong_name_stops_before_anything_is_changed(
    tried: Any, names: list[str], wrong: list[str], question: str
) -> None:
    """Whatever stands beside it, and only the wrong ones are named."""
    model, one = Model(), tried(names)
    one.train(model)
    assert changed(model) == []
    (reason,) = one.stopped
    asked, _, _ = reason.partition(". There are ")
    assert reason.startswith("the program has no module of this name: ")
    assert question in reason
    assert all(name in asked for name in wrong)
    assert asked.count("--checkpoint") == len(wrong)
    assert one.trial.end() != ""


def test_a_module_list_is_not_called_and_stops_the_right_names_too(tried: Any) -> None:
    model, one = Model(), tried(["head", "blocks"])
    one.train(model)
    assert changed(model) == []
    assert "a ModuleList is not called; name its members, as in blocks.0" in one.stopped[0]


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch for the CPU")
def test_an_offload_that_moves_nothing_stops_the_right_checkpoints_too(tried: Any) -> None:
    model, one = Model(), tried(["head"], ["blocks.0"])
    one.train(model)
    assert changed(model) == []
    assert "--offload blocks.0: it keeps nothing on a GPU" in one.stopped[0]


def test_several_models_take_their_own_names_also_if_one_is_called_late(tried: Any) -> None:
    actor, critic = Model(), Critic()
    one = tried(["head", "Critic.body"])
    one.train(actor, critic)
    assert changed(actor, critic) == ["head", "body"]
    assert not one.stopped


def test_names_that_no_single_model_has_are_to_be_written_with_their_models(tried: Any) -> None:
    actor, critic = Model(), Critic()
    one = tried(["head", "body"])
    one.train(actor, critic)
    assert changed(actor, critic) == []
    assert "--checkpoint head: no model has all of these; write Model.head" in one.stopped[0]


def test_a_model_that_is_made_before_the_first_step_may_have_the_names(tried: Any) -> None:
    one, teacher = tried(["body", "out"]), Model()
    teacher(torch.ones(2, 4))
    critic = Critic()
    one.train(critic)
    assert changed(teacher, critic) == ["body", "out"]
    assert not one.stopped


TRAIN = """
import sys, torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.ones(4, 8)).sum()
    if len(sys.argv) > 1:
        loss.backward()
        optimizer.step()
print("ended")
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAIN)
    return subprocess.run(
        [sys.executable, "-m", "pytracer", "run", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.ci
@pytest.mark.parametrize("option", ["--checkpoint", "--offload"])
def test_the_command_ends_with_one_line_and_no_file(option: str, tmp_path: Path) -> None:
    ran = run(tmp_path, option, "[0],nope", "train.py", "steps")
    assert (ran.returncode, ran.stdout) == (errors.UsageError.exit_code, "")
    assert ran.stderr == (
        f"pytracer: the program has no module of this name: {option} nope. There are [0], [1], [2]. "
        "Stopped before the first step, and nothing was changed\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.ci
def test_a_trial_that_changed_nothing_has_exit_code_2(tmp_path: Path) -> None:
    """A program without steps, one that never imports torch, and one that is stopped."""
    ran = run(tmp_path, "--checkpoint", "nope", "train.py")
    assert (ran.returncode, ran.stdout) == (errors.UsageError.exit_code, "ended\n")
    assert "no module of this name: --checkpoint nope. There are [0], [1], [2]" in ran.stderr
    (tmp_path / "other.py").write_text("print('ended')\n")
    ran = run(tmp_path, "--checkpoint", "nope", "other.py")
    assert (ran.returncode, ran.stdout) == (errors.UsageError.exit_code, "ended\n")
    (tmp_path / "eval.py").write_text(TRAIN.replace("for _", "torch.set_grad_enabled(False)\nfor _")
                                      .replace("loss.backward()", ""))  # fmt: skip
    ran = run(tmp_path, "--checkpoint", "[0]", "--steps", "2", "--stop", "eval.py", "steps")
    assert ran.returncode == errors.UsageError.exit_code
    assert "--checkpoint [0]: not called with gradients, so the trial changed nothing" in ran.stderr
