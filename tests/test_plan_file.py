"""`plan.toml` and `pytracer run --apply`: what a plan says, and what it changes in a program."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from pytracer import errors, load
from pytracer.data.changes import OPTIMIZERS, Changes, changes_of
from pytracer.reading import plan_file
from pytracer.reading.plan_file import Saved
from pytracer.recording.applied import Applied

names = st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=3).map(tuple)
any_changes = st.builds(
    Changes,
    settings=st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:64"]),
    checkpoint=names,
    offload=names,
    optimizer=st.sampled_from(["", *OPTIMIZERS]),
    set_to_none=st.booleans(),
    bucket_views=st.booleans(),
)


@given(any_changes, st.dictionaries(st.sampled_from(["peak", "time"]), st.integers(0, 2**50)))
def test_a_plan_read_back_is_equal(tmp_path_factory, changes: Changes, promised) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    plan_file.write(path, Saved(changes, promised), "a title")
    assert plan_file.read(path) == Saved(changes, promised)
    assert changes_of({one.name: getattr(changes, one.name) for one in fields(Changes)}) == changes


@given(any_changes)
def test_what_is_written_is_toml(changes: Changes) -> None:
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    read = tomllib.loads(Saved(changes, {"peak": 5}).text("a title"))
    assert read.pop("promised") == {"peak": 5}
    assert changes_of(read) == changes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no plan: pytracer fit train.py -o plan.toml writes one"),
        ("checkpoint = [", "plan.toml:1: write one KEY = VALUE per line"),
        ("# x\nimport os", "plan.toml:2: write one KEY = VALUE per line"),
        ("checkpoints = []", "has 'checkpoints', which is no change; did you mean 'checkpoint'?"),
        ('checkpoint = "h.0"', 'checkpoint is a list of modules, as in ["h.0"]'),
        ("checkpoint = [1]", "checkpoint is a list of modules"),
        ("set_to_none = 1", "set_to_none is true or false"),
        ("settings = true", "settings is a text"),
        ('settings = "expandable:True"', "PYTORCH_ALLOC_CONF has no expandable"),
        ('optimizer = "fast"', "optimizer is fused, foreach, 8bit or loop"),
        ("[" * 100_000 + " = 1", "write one KEY = VALUE per line"),
    ],
)
def test_a_wrong_plan_is_one_clear_sentence(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(errors.UsageError) as problem:
        plan_file.read(path)
    assert says in str(problem.value)


def test_a_missing_plan_is_named_with_a_similar_one(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("")
    with pytest.raises(errors.UsageError, match=r"did you mean 'plan\.toml'"):
        plan_file.read(tmp_path / "plans.toml")


# ---------------------------------------------------------------- in this process


def steps(changes: Changes, set_to_none: bool = True, kind=torch.optim.Adam) -> tuple[list, str]:
    """The weights after each of three steps under the changes, and what was wrong."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.1)
    applied = Applied(changes)
    applied.begin()
    seen = []
    try:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            seen.append(model.weight.detach().clone())
    finally:
        problem = applied.end()
    return seen, problem


@pytest.mark.parametrize("how", [each for each in OPTIMIZERS if each != "8bit"])
def test_an_optimizer_steps_as_the_plan_says(how: str) -> None:
    seen: dict[str, bool] = {}

    class Adam(torch.optim.Adam):
        def step(self, closure=None):
            super().step(closure)
            seen.update({key: self.param_groups[0][key] for key in ("fused", "foreach")})

    ours, problem = steps(Changes(optimizer=how), kind=Adam)
    plain, _ = steps(Changes())
    assert (seen, problem) == ({"fused": how == "fused", "foreach": how == "foreach"}, "")
    torch.testing.assert_close(ours, plain)


def test_gradients_are_dropped_as_the_plan_says() -> None:
    before = torch.optim.Optimizer.zero_grad
    kept = []

    class SGD(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none)
            kept.append(self.param_groups[0]["params"][0].grad is not None)

    ours, problem = steps(Changes(set_to_none=True), set_to_none=False, kind=SGD)
    assert (kept, problem) == ([False] * 3, "")
    plain, _ = steps(Changes(), set_to_none=False, kind=SGD)
    assert kept[4:] == [True] * 2
    assert all(map(torch.equal, ours, plain))
    assert torch.optim.Optimizer.zero_grad is before


@pytest.mark.parametrize(
    "changes", [Changes(set_to_none=True), Changes(bucket_views=True), Changes(optimizer="fused")]
)
def test_a_change_without_an_effect_is_named(changes: Changes) -> None:
    _, problem = steps(changes, kind=torch.optim.Rprop)
    assert "changed nothing in this program" in problem


# ---------------------------------------------------------------- pytracer run --apply

SCRIPT = """
import os
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(),
                                                  torch.nn.Linear(64, 64)) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    loss = model(torch.randn(512, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
print(os.environ.get("PYTORCH_ALLOC_CONF"))
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytracer", "run", "-f", "-o", "out.pytrace", *options]
    return subprocess.run([*command, "train.py"], cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_a_plan_is_applied_to_an_unchanged_program(tmp_path: Path, monkeypatch) -> None:
    """The losses are bit-equal, activations are fewer, and torch gets the allocator's settings."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    (tmp_path / "train.py").write_text(SCRIPT)
    changes = Changes(settings="max_split_size_mb:64", checkpoint=("[0]", "[1]"))
    plan_file.write(tmp_path / "plan.toml", Saved(changes), "a plan")
    plain = run(tmp_path)
    held = load(tmp_path / "out.pytrace").summary().at_peak["activations"]
    applied = run(tmp_path, "--apply", "plan.toml")
    fewer = load(tmp_path / "out.pytrace").summary().at_peak["activations"]
    assert (plain.returncode, applied.returncode) == (0, 0), applied.stderr
    assert plain.stdout.splitlines()[:2] == applied.stdout.splitlines()[:2]
    assert applied.stdout.splitlines()[2] == "max_split_size_mb:64"
    assert fewer < held
    plan_file.write(tmp_path / "plan.toml", Saved(Changes(bucket_views=True)), "a plan")
    wrong = run(tmp_path, "--apply", "plan.toml")
    assert wrong.returncode == errors.UsageError.exit_code
    assert "bucket_views = true changed nothing in this program" in wrong.stderr
    assert run(tmp_path, "--apply", "none.toml").returncode == errors.UsageError.exit_code
