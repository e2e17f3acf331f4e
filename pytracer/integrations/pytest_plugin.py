"""`@pytest.mark.memory_budget(peak="2 GiB", activations="1 GiB", growth_per_step=0)`.

Traces the test's body. A test over its budget fails and shows the table. Tests without a budget do
not import torch.
"""

from collections.abc import Generator
from typing import Any

import pytest

_MARK = "memory_budget"
_TRACE_OPTIONS = ("devices", "detail", "stacks", "saved_tensors")
_TABLE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark, so that --strict-markers accepts it."""
    config.addinivalue_line(
        "markers",
        f'{_MARK}(peak="2 GiB", activations=..., growth_per_step=0, devices="cuda"): fail if the '
        "test needs more memory; any category can have a limit, and growth needs three steps",
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, None]:
    """Traces the body of a test with a budget, without its fixtures."""
    mark = pyfuncitem.get_closest_marker(_MARK)
    if mark is None:
        yield
        return
    from pytracer import errors
    from pytracer.export.budget import exceeded_lines
    from pytracer.recording.api import trace

    limits = {k: v for k, v in mark.kwargs.items() if k not in _TRACE_OPTIONS}
    options = {k: v for k, v in mark.kwargs.items() if k in _TRACE_OPTIONS}
    if mark.args or not limits:
        pytest.fail(f'{_MARK} takes limits by name, as in peak="2 GiB"', pytrace=False)
    traced = trace(table=False, **options)
    with traced:
        outcome = yield
    pyfuncitem.stash[_TABLE] = traced.post_mortem() or str(traced)
    if outcome.excinfo is not None:
        return
    try:
        over = traced.check(**limits)
    except errors.UsageError as problem:
        outcome.force_exception(pytest.fail.Exception(f"{_MARK}: {problem}", pytrace=False))
        return
    if over:
        text = "\n".join(exceeded_lines(over))
        failed = pytest.fail.Exception(f"memory budget exceeded\n{text}", pytrace=False)
        outcome.force_exception(failed)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Adds the table to the report of a failing test with a budget."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed and _TABLE in item.stash:
        report.sections.append(("memory", item.stash[_TABLE]))
