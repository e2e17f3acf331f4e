"""Programs that say what their tensors are, in every mode."""

import hashlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pytracer import trace
from pytracer.analysis import findings, views
from pytracer.export.table import size_text
from tests.conformance.cases import sums_hold
from tests.conformance.engines import ON_A_GPU, PROGRAMS  # the last to add its own
from tests.conformance.programs import MODES, run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# What is found in a program, and truly so: it keeps each step's tensors in a list, or a variable
# lives through backward. In all others nothing is found.
KEPT = {
    "what_is_made_like_a_target_and_kept_unused": {"growth"},
    "a_validation_whose_outputs_are_kept": {"growth"},
    "a_table_that_the_first_forward_makes": {"held"},
    "two_views_beside_the_rest_of_the_batch": {"held"},
    "a_queue_of_keys_and_a_slow_encoder": {"held"},
    "hard_triplets_are_looked_for": {"held"},
    "a_model_with_pruned_weights": {"held"},  # by the module, until its next call
    "curvature_by_a_product": {"held"},  # by the transform: docs/limits.md
}


def everywhere() -> Iterator[Any]:
    for name in PROGRAMS:
        if name not in ON_A_GPU:
            yield pytest.param(name, "cpu", id=f"{name}-cpu")
        yield pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.cuda)


@pytest.mark.filterwarnings("ignore")  # torch's, of what these programs use
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "device"), list(everywhere()))
def test_tensors_are_what_the_program_says_they_are(name: str, mode: str, device: str) -> None:
    """Nothing is unknown, and at every event the categories sum to what is allocated."""
    says = run(name, mode, device)
    assert says.told
    assert says.wrong() == []
    assert says.data is not None
    rows = {row.category: row.own_peak for row in views.category_rows(says.data)}
    assert rows["unknown"] == 0
    assert sums_hold(says.data)
    if device == "cpu" and mode == "default":
        kinds = {finding.kind for finding in findings.findings(says.data, size_text)}
        assert kinds == KEPT.get(name, set())


def categories_of_a_run(seconds: float) -> list[tuple[str, str, int]]:
    """Of each allocation, in order, from a program that rests between its steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))
    optimizer = torch.optim.Adam(model.parameters())
    kept = []
    with trace(model, optimizer, report=False) as t:
        for step in range(24):
            x, y = torch.randn(33, 64), torch.randn(33, 64)
            kept.append(torch.randn(33, 64))
            (model(x) - y).abs().mean().backward()
            if step % 3 == 0:
                (model(x) * y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(seconds)
    rows = t.allocations().sort_values("start_ns", kind="stable")
    columns = (rows.category.astype(str), rows.role.astype(str), rows.requested_bytes)
    return list(zip(*columns, strict=True))


def test_the_same_program_has_the_same_categories_in_ten_runs_and_under_load() -> None:
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            hashlib.sha256(bytes(1 << 20)).digest()

    runs = [categories_of_a_run(0.004 * (turn % 3)) for turn in range(5)]
    burning = [threading.Thread(target=burn) for _ in range(3)]
    for thread in burning:
        thread.start()
    try:
        runs += [categories_of_a_run(0.002 * (turn % 2)) for turn in range(5)]
    finally:
        stop.set()
        for thread in burning:
            thread.join()
    assert all(one == runs[0] for one in runs[1:])
