"""Ranges behave as the sets of addresses that they stand for."""

from hypothesis import given, strategies as st

from pytracer.basics.ranges import Ranges

changes = st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 10)))


@given(changes, st.integers(0, 30), st.integers(1, 10))
def test_ranges_are_sets_of_addresses(
    wanted: list[tuple[bool, int, int]], at: int, size: int
) -> None:
    found: Ranges[str] = Ranges()
    addresses: set[int] = set()
    for adds, begin, length in wanted:
        found.remove(begin, begin + length)
        addresses -= set(range(begin, begin + length))
        if adds and length:
            found.add(begin, begin + length, "x")
            addresses |= set(range(begin, begin + length))
    assert {a for begin, end, _ in found for a in range(begin, end)} == addresses
    assert [begin for begin, _, _ in found] == sorted(begin for begin, _, _ in found)
    asked = set(range(at, at + size))
    assert found.touches(at, at + size) == bool(asked & addresses)
    one = any(begin <= at and at + size <= end for begin, end, _ in found)
    assert found.covers(at, at + size) == one
