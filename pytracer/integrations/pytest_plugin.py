"""`@pytest.mark.memory_budget(peak="2 GiB", activations="1 GiB", growth_per_step=0)`.

Traces the test's body, or with `on="H100"` runs it on an imagined card. A test over its budget fails and shows the table. Tests without a budget do
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
        f'{_MARK}(peak="2 GiB", activations=..., growth_per_step=0, devices="cuda", on="H100"): fail if the '
        "test needs more memory; any category can have a limit, growth needs three steps, and on= "
        "imagines the card, so that no GPU is needed",
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

    limits = {k: v for k, v in mark.kwargs.items() if k not in _TRACE_OPTIONS}
    options = {k: v for k, v in mark.kwargs.items() if k in _TRACE_OPTIONS}
    card = limits.pop("on", None)
    if mark.args or not limits:
        pytest.fail(f'{_MARK} takes limits by name, as in peak="2 GiB"', pytrace=False)
    try:
        traced = _block(card, options)
    except errors.UsageError as problem:
        pytest.fail(f"{_MARK}: {problem}", pytrace=False)
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


def _block(card: Any, options: dict[str, Any]) -> Any:
    """A recording, or a run on an imagined card if the mark names one."""
    if card is None:
        from pytracer.recording.api import trace

        return trace(table=False, **options)
    from pytracer import errors
    from pytracer.imagined.run import imagine

    for name in ("devices", "saved_tensors"):
        if name in options:
            raise errors.UsageError(f'{name}= is for a real run, and on="{card}" imagines one')
    return imagine(card, **options)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Adds the table to the report of a failing test with a budget."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed and _TABLE in item.stash:
        report.sections.append(("memory", item.stash[_TABLE]))
