"""`%load_ext pytracer`, `%%memtrace` and `%memtrace`."""

import pytest

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


def test_a_line_is_traced(shell, capsys) -> None:
    shell.run_cell("import torch\n%memtrace y = torch.ones(1 << 18)")
    assert "peak 1.00 MiB on cpu" in capsys.readouterr().out
    assert shell.user_ns["memtrace"].peak.bytes == 1 << 20


def test_the_targets_may_be_named_and_errors_are_the_cells_own(shell, capsys) -> None:
    shell.run_cell("import torch\nmodel = torch.nn.Linear(8, 8)")
    result = shell.run_cell("%%memtrace model\nmodel(torch.ones(2, 8)); 1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert capsys.readouterr().out.count(": division by zero") == 1
    assert shell.user_ns["memtrace"].peak.by_category["weights"] == (64 + 8) * 4
