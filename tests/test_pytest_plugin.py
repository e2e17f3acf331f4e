"""Memory budgets as a mark on tests, as users of pytest will meet them."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[1]

TESTS = """
import pytest
import torch

kept = []

def train(leak):
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(3, 10)).sum().backward()
        optimizer.step()
        if leak:
            kept.append(torch.ones(100))

@pytest.mark.memory_budget(peak="1 MiB", devices="cpu")
def test_small():
    torch.ones(1000)

@pytest.mark.memory_budget(peak="1 MiB", temporaries="2 MiB", devices="cpu")
def test_large():
    torch.ones(1 << 20)

def test_without():
    torch.ones(1 << 20)

@pytest.mark.memory_budget(growth_per_step=0, devices="cpu")
@pytest.mark.parametrize("leak", [False, True])
def test_training(leak):
    train(leak)

@pytest.mark.memory_budget(peak=1, devices="cpu")
def test_wrong():
    torch.ones(10)
    assert 1 == 2

@pytest.mark.memory_budget(peak=1, devices="cpu")
def test_greedy():
    torch.empty(1 << 44)

@pytest.mark.memory_budget()
def test_no_limit(): pass

@pytest.mark.memory_budget(3)
def test_no_name(): pass

@pytest.mark.memory_budget(memory="1 GiB")
def test_no_such_limit(): pass

@pytest.mark.memory_budget(peak="much")
def test_no_size(): pass

@pytest.mark.memory_budget(growth_per_step=0)
def test_no_steps(): pass

@pytest.mark.memory_budget(peak=1, device="cpu")
def test_no_such_option(): pass

@pytest.mark.memory_budget(peak="128 MiB", weights=440, on="H100")
def test_on_a_card():
    model = torch.nn.Linear(10, 10, device="cuda")
    model(torch.ones(3, 10, device="cuda")).sum().backward()

@pytest.mark.memory_budget(weights=439, on="H100")
def test_too_much_on_a_card():
    torch.nn.Linear(10, 10, device="cuda")(torch.ones(3, 10, device="cuda"))

@pytest.mark.memory_budget(peak="1 MiB", on="H900")
def test_on_no_card(): pass

@pytest.mark.memory_budget(peak="1 MiB", on="H100", devices="cpu")
def test_on_a_card_and_a_device(): pass
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each test's report: its outcome and its text. One process for all: torch takes its time."""
    folder = tmp_path_factory.mktemp("budgets")
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "pytracer.integrations.pytest_plugin"]
    command += ["--strict-markers", "--junit-xml=out.xml", "-p", "no:cacheprovider", "-q"]
    # Named above and not found by its entry point: a checkout that was packaged has one, others not.
    by_name_alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **by_name_alone}
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert found.returncode == 1, found.stdout + found.stderr
    reports = {}
    for case in ET.parse(folder / "out.xml").iter("testcase"):
        failure = case.find("failure")
        text = "passed" if failure is None else str(failure.attrib["message"]) + str(failure.text)
        reports[case.attrib["name"]] = text
    reports["output"] = found.stdout
    return reports


def test_a_test_within_its_budget_passes(ran) -> None:
    assert ran["test_small"] == ran["test_without"] == ran["test_training[False]"] == "passed"


def test_one_over_it_fails_and_shows_where_memory_went(ran) -> None:
    assert "peak 4.00 MiB, limit 1.00 MiB: 3.00 MiB too much" in ran["test_large"]
    assert "- memory -" in ran["output"]
    assert "\npeak 4.00 MiB on cpu" in ran["output"]


def test_growth_per_step_is_held_against_zero(ran) -> None:
    assert "growth_per_step 400 B, limit 0 B" in ran["test_training[True]"]


def test_what_the_test_itself_raises_is_what_is_reported(ran) -> None:
    assert "assert 1 == 2" in ran["test_wrong"]
    assert "DefaultCPUAllocator" in ran["test_greedy"]
    assert "exceeded" not in ran["test_wrong"] + ran["test_greedy"]
    assert "\nout of memory on cpu" in ran["output"]


def test_a_budget_that_cannot_be_held_says_why(ran) -> None:
    assert "takes limits by name" in ran["test_no_limit"]
    assert "takes limits by name" in ran["test_no_name"]
    assert "no limit is called 'memory'" in ran["test_no_such_limit"]
    assert "no limit is called 'device'" in ran["test_no_such_option"]
    assert "'much' is not a size" in ran["test_no_size"]
    assert "needs three steps" in ran["test_no_steps"]


def test_a_budget_on_a_card_needs_no_card(ran) -> None:
    assert ran["test_on_a_card"] == "passed"
    assert "weights 440 B at its own peak, limit 439 B" in ran["test_too_much_on_a_card"]
    assert "no card is called 'H900'" in ran["test_on_no_card"]
    assert "devices= is for a real run" in ran["test_on_a_card_and_a_device"]


def test_pytest_starts_without_torch_where_no_test_has_a_budget() -> None:
    program = "import sys, pytracer.integrations.pytest_plugin; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert ran.stdout == "False\n"
