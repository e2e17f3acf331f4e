"""`%load_ext pytracer`, `%%memtrace` and `%memtrace`."""

import pytest

from pytracer import errors

interactive = pytest.importorskip("IPython.core.interactiveshell")
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def shell():
    shell = interactive.InteractiveShell()
    shell.run_line_magic("load_ext", "pytracer")
    return shell


def test_a_cell_is_traced_and_its_variables_stay(shell, capsys) -> None:
    shell.run_cell("import torch")
    shell.run_cell("%%memtrace --stacks\nx = torch.ones(1 << 18)")
    assert "peak 1.00 MiB on cpu" in capsys.readouterr().out
    assert shell.user_ns["x"].numel() == 1 << 18
    assert shell.user_ns["memtrace"].peak.bytes == 1 << 20


def test_a_line_of_a_cell_is_named_as_ipython_names_it(shell, capsys, monkeypatch) -> None:
    monkeypatch.setattr(interactive.InteractiveShell, "_instance", shell)  # as a kernel's shell is
    shell.run_cell("import torch\ndef make():\n    return torch.ones(1 << 18)", store_history=True)
    shell.run_cell("%%memtrace --stacks\nx = make()", store_history=True)
    assert "lines     In[1]:3 1.00 MiB" in capsys.readouterr().out


def test_a_line_is_traced(shell, capsys) -> None:
    shell.run_cell("import torch\n%memtrace y = torch.ones(1 << 18)")
    assert "peak 1.00 MiB on cpu" in capsys.readouterr().out
    assert shell.user_ns["memtrace"].peak.bytes == 1 << 20


@pytest.mark.parametrize("options", ["", " --category", "  --stacks   "])
def test_a_line_is_run_as_it_was_written(shell, options) -> None:
    shell.run_cell(f"%memtrace{options} x, y = 'a   b', {{'a': '$x  {{y}}'}}")
    assert shell.user_ns["x"] == "a   b"
    assert shell.user_ns["y"] == {"a": "$x  {y}"}


def test_a_variable_that_is_not_there_is_said_in_a_line(shell) -> None:
    result = shell.run_cell("%%memtrace missing_model\n1")
    assert isinstance(result.error_in_exec, errors.UsageError)
    assert "missing_model: there is no variable 'missing_model'" in str(result.error_in_exec)


def test_the_targets_may_be_named_and_errors_are_the_cells_own(shell, capsys) -> None:
    shell.run_cell("import torch\nmodel = torch.nn.Linear(8, 8)")
    result = shell.run_cell("%%memtrace model\nmodel(torch.ones(2, 8)); 1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert capsys.readouterr().out.count(": division by zero") == 1
    assert shell.user_ns["memtrace"].peak.by_category["weights"] == (64 + 8) * 4


@pytest.mark.parametrize("cell", ["%%memtrace --stacks\ntrain()", "%memtrace --stacks train()"])
def test_a_leak_is_named_by_the_users_variable_and_not_by_ipythons(shell, cell) -> None:
    shell.run_cell(
        "import torch\nmodel = torch.nn.Linear(64, 64); hist = []\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def train():\n"
        "    for _ in range(5):\n"
        "        hist.append(model(torch.randn(256, 64)))\n"
        "        hist[-1].sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    shell.run_cell(cell)
    rows = shell.user_ns["memtrace"].findings().to_dict("records")
    assert ["`hist` keeps" in row["evidence"] for row in rows] == [True]
