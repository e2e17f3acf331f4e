"""The GitHub Action, `action.yml`: its steps run here, with a `gh` that only writes down its calls."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
SCRIPT = """\
import torch
model = torch.nn.Linear(512, 512).to("cuda")
optimizer = torch.optim.SGD(model.parameters())
kept = []
for _ in range(2):
    x = torch.randn(1024, 512, device="cuda")
    model(x).sum().backward()
    optimizer.step()
"""
KEEPS = SCRIPT.replace("    optimizer.step", "    kept.append(x)\n    optimizer.step")
# Writes its arguments down, and knows one comment if there is a file "old".
GH = """\
#!/bin/bash
printf '%s\\n' "$*" >> "$GH_LOG"
if [[ "$*" == *--jq* && -e "$GH_OLD" ]]; then echo 77; echo 78; fi
"""


class Runner:
    """Runs the steps of the action as GitHub does."""

    def __init__(self, folder: Path, inputs: Mapping[str, str]) -> None:
        self.action = yaml.safe_load((ROOT / "action.yml").read_text())
        self.folder, self.temp = folder / "work", folder / "temp"
        self.log, self.old = folder / "gh.log", folder / "old"
        self.temp.mkdir()
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        python = f'#!/bin/bash\nexec "{sys.executable}" "$@"\n'
        for name, text in (("gh", GH), ("python", python)):
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755)
        defaults = {name: one.get("default", "") for name, one in self.action["inputs"].items()}
        self.inputs = {**defaults, **inputs}
        self.environment = {
            **os.environ,
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RUNNER_TEMP": str(self.temp),
            "GITHUB_OUTPUT": str(self.temp / "output"),
            "GITHUB_STEP_SUMMARY": str(self.temp / "summary"),
            "GH_LOG": str(self.log),
            "GH_OLD": str(self.old),
        }
        self.facts = {
            "github.event.pull_request.base.sha || github.event.before": git(
                self.folder, "rev-parse", "main"
            ),
            "github.event.pull_request.number": "5",
            "github.repository": "people/project",
        }

    def value(self, text: str) -> str:
        """The text with the expressions filled in. An unknown one is an error."""

        def fill(match: re.Match[str]) -> str:
            name = match[1].strip()
            return self.inputs[name[7:]] if name.startswith("inputs.") else self.facts[name]

        return re.sub(r"\$\{\{(.*?)\}\}", fill, text)

    def step(self, name: str) -> subprocess.CompletedProcess[str]:
        (step,) = (one for one in self.action["runs"]["steps"] if one["name"] == name)
        assert "${{" not in step["run"], "inputs reach a script as variables only"
        variables = {key: self.value(text) for key, text in step.get("env", {}).items()}
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.folder,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
        )

    def output(self) -> str:
        return (self.temp / "output").read_text()


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def pull_request(tmp_path: Path) -> Any:
    """A clone with a branch on which the program has this text."""
    if shutil.which("git") is None:
        pytest.skip("needs git")

    def make(text: str, **inputs: str) -> Runner:
        origin, work = tmp_path / "origin", tmp_path / "work"
        origin.mkdir()
        git(origin, "init", "-q", "-b", "main")
        (origin / "train.py").write_text(SCRIPT)
        git(origin, "add", ".")
        git(origin, "commit", "-qm", "first")
        git(tmp_path, "clone", "-q", str(origin), str(work))
        git(work, "checkout", "-qb", "branch")
        (work / "train.py").write_text(text)
        return Runner(tmp_path, {"program": "train.py", "on": "T4", **inputs})

    return make


BEFORE, AFTER, COMMENT = "Imagine the step before", "Imagine the step after", "Write one comment"


@pytest.mark.slow
def test_a_pull_request_that_keeps_a_tensor_gets_one_comment(pull_request) -> None:
    runner = pull_request(KEEPS)
    for name in (BEFORE, AFTER, COMMENT):
        done = runner.step(name)
        assert done.returncode == 0, (name, done.stderr)
    assert runner.output() == "differs=true\n"
    comment = (runner.temp / "comment.md").read_text()
    assert comment.startswith("<!-- pytracer: train.py -->\n### train.py needs +2.00 MiB")
    assert "`train.py:6`" in comment
    assert 1 <= comment.count("\n- ") <= 3
    assert (runner.temp / "summary").read_text() in comment
    assert "POST repos/people/project/issues/5/comments" in runner.log.read_text()
    runner.old.touch()
    assert runner.step(COMMENT).returncode == 0
    assert "PATCH repos/people/project/issues/comments/77" in runner.log.read_text()


@pytest.mark.slow
def test_a_pull_request_without_a_difference_passes(pull_request) -> None:
    runner = pull_request(SCRIPT.replace("x = ", "# a comment\n    x = "))
    for name in (BEFORE, AFTER):
        done = runner.step(name)
        assert done.returncode == 0, (name, done.stderr)
    assert runner.output() == "differs=false\n"


@pytest.mark.slow
def test_a_pull_request_that_cannot_be_imagined_fails(pull_request) -> None:
    runner = pull_request("raise ValueError('no')\n")
    assert runner.step(BEFORE).returncode == 0
    done = runner.step(AFTER)
    assert done.returncode == 1
    assert "cannot be imagined" in done.stderr
    assert not (runner.temp / "output").exists()


def test_the_action_installs_itself_and_hands_on_what_differs() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    first, *_, last = action["runs"]["steps"]
    assert '"$GITHUB_ACTION_PATH"' in first["run"]
    assert "steps.compare.outputs.differs == 'true'" in last["if"]
    assert last["run"].strip().endswith("exit 3")
