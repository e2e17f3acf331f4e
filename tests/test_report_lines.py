"""Which line of the program holds memory, on the page, where it calls libraries that have the line."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from pytracer.export import packed
from tests.browser import browser_page
from tests.report_pages import largest_of, shown
from tests.test_diff import MIB
from tests.tiers import by_tier
from tests.trace_builder import TraceBuilder

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LIBRARY = "/usr/lib/python3/dist-packages/nets/attention.py"
FRAMES = ["/me/train.py:5", "/me/train.py:6", f"{LIBRARY}:7", f"{LIBRARY}:9", "/me/data.py:2"]
STACKS = st.lists(st.sampled_from(FRAMES), max_size=4)  # outermost first


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    with browser_page() as found:
        yield found


@settings(
    max_examples=by_tier(6, 12, 100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(STACKS, st.integers(1, 9)), min_size=1, max_size=6))
def test_own_lines_are_those_that_call_libraries(tab: Any, blocks: list[Any]) -> None:
    """Held against a walk up each block's stack; what no line of the program called has none."""
    b = TraceBuilder()
    own: Counter[str] = Counter()
    for stack, size in blocks:
        with b.op("aten::mm", grad=True, at=tuple(stack)):
            b.alloc(size * MIB)
        mine = [packed.relative(frame) for frame in stack if LIBRARY not in frame]
        own[mine[-1] if mine else "not known"] += size * MIB
    calls = any(stack and LIBRARY in stack[-1] for stack, _ in blocks)
    with tempfile.TemporaryDirectory() as folder:
        page = shown(tab, Path(folder), b.trace()).open()
        said = {key: (name, size) for key, name, size in largest_of(page)}
        named = {name: size for name, size in own.items() if name != "not known"}
        assert ("your own line" in said) == (calls and bool(named))
        if "your own line" in said:
            name, size = said["your own line"]
            assert named[name] == size == max(named.values())
        if calls:
            page.show("lines")
            found = page.tree()
            assert {name: found.get(name) for name in own} == dict(own)
