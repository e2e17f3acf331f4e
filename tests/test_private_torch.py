"""Private things of torch that C++ reads: they stand in one file, and are tried by name."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pytracer.data._native import C

HOOKS = Path(__file__).parents[1] / "csrc" / "torch"
PRIVATE = ("private_torch.h", "private_torch.cpp")


def problems() -> dict[str, str]:
    return {name: problem for name, _, problem in C.private_torch() if problem}


def test_all_of_it_is_here_in_this_torch() -> None:
    checks = C.private_torch()
    assert problems() == {}
    assert len({name for name, _, _ in checks}) == len(checks) >= 15
    assert all(purpose for _, purpose, _ in checks)


def step_without_wrapper(_optimizer: Any) -> None:
    pass


step_without_wrapper.__dict__["hooked"] = True  # so torch believes


@pytest.mark.parametrize(
    ("owner", "attribute", "instead", "names"),
    [
        (torch.nn.Module, "_call_impl", len, ["torch.nn.Module._call_impl"]),
        (torch.cuda, "_queued_calls", (), ["torch.cuda._queued_calls"]),
        (
            torch.optim.SGD,
            "step",
            step_without_wrapper,
            ["name of an optimizer's step", "wrapper of an optimizer's step"],
        ),
    ],
)
def test_what_has_changed_is_named(
    owner: Any, attribute: str, instead: Any, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, attribute, instead)
    assert list(problems()) == names


def test_trying_it_changes_nothing_of_the_program() -> None:
    before = torch.random.get_rng_state()
    C.private_torch()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.is_grad_enabled()


def test_private_names_stand_in_one_file() -> None:
    """A release of torch that changes them is followed there."""
    private = re.compile(
        r"_no_checks|N5torch|\b6PyNode|7CppNode|_ZN|RTLD_NOLOAD|evaluate_function"
        r'|"_(?!_|is_param|parameters|modules|held)\w+"|"torch\._C|"Optimizer\.step'
    )
    outside = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted(HOOKS.iterdir())
        if path.name not in PRIVATE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line.partition("//")[0])
    ]
    assert outside == []
