"""Replay follows a recording to the byte, and elsewhere answers for all orders of segments."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import Phase, assume, find, given, settings, strategies as st

from pytracer.data._native import core
from tests import allocator_reference as reference
from tests.allocator_reference import ALLOC, FREE_COMPLETED, MIB, NONE, Rules
from tests.recorded_streams import Recording, record
from tests.test_allocator_replay import ANY, LANES, streams
from tests.tiers import by_tier

FIELDS = ("kind", "block", "bytes", "lane")
COUNTED = ("reserved", "allocated", "active", "peak_reserved", "peak_allocated", "peak_active")


def table(steps, addresses=None):
    columns = np.array(steps, dtype=np.uint64).reshape(-1, 4).T
    found = dict(zip(FIELDS, columns, strict=True)) | {"lanes": LANES}
    return found if addresses is None else found | {"address": np.array(addresses, np.uint64)}


def assert_equal(recording: Recording, rules: Rules) -> dict:
    found = core.replay(table(recording.steps, recording.addresses), asdict(rules), True)
    plain = reference.replay(recording.steps, LANES, rules, recording.addresses)
    for name, value in plain.items():
        mine = found[name]
        assert (mine.tolist() if isinstance(mine, np.ndarray) else mine) == value, name
    return found


# ---------------------------------------------------------------- a recording

# Torch's own settings, beside which a refusal of the driver is told from all else.
PLAIN = {**ANY, "max_split_size": st.just(NONE), "limit": st.just(NONE), "gc_threshold": st.just(0)}
RECORDED = st.one_of(
    st.tuples(streams(), st.builds(Rules, **ANY | {"capacity": st.just(NONE)})),
    st.tuples(streams(), st.builds(Rules, **PLAIN)),
)


@settings(max_examples=by_tier(120, 600, 5000), deadline=None)
@given(RECORDED, st.integers(0, 1000))
def test_a_recording_is_followed_to_the_byte(case, seed):
    """Wherever the driver puts its segments, and where it has none: no block lies elsewhere."""
    steps, rules = case
    steps = [step for step in steps if step[0] != reference.ATTEMPT]
    recording = record(steps, LANES, rules, seed)
    found = assert_equal(recording, replace(rules, capacity=NONE))
    assert found["departed_step"] == -1
    assert {name: found[name] for name in COUNTED} == {
        name: recording.counted[name] for name in COUNTED
    }


@settings(max_examples=by_tier(100, 500, 5000), deadline=None)
@given(streams(trims=False), st.integers(0, 1000), st.integers(0, 40))
def test_a_recording_that_began_late_is_followed_too(steps, seed, late):
    """The gaps between the blocks that were there are known from their addresses."""
    steps = [step for step in steps if step[0] in (ALLOC, FREE_COMPLETED)]
    recording = record(steps, LANES, Rules(), seed, late)
    found = assert_equal(recording, Rules())
    assert found["departed_step"] == -1
    assert {name: found[name] for name in COUNTED} == {
        name: recording.counted[name] for name in COUNTED
    }


@settings(max_examples=by_tier(100, 500, 5000), deadline=None)
@given(RECORDED, st.integers(0, 1000), st.data())
def test_where_a_recording_shows_something_else_the_replay_leaves_it(case, seed, data):
    """A damaged address, a lost answer or another limit: both allocators leave at the same step."""
    steps, rules = case
    recording = record(steps, LANES, rules, seed)
    assume(recording.steps)
    at = data.draw(st.integers(0, len(recording.steps) - 1))
    way = data.draw(st.sampled_from(["address", "lost", "limit", "order"]))
    if way == "address":
        recording.addresses[at] += data.draw(st.sampled_from([512, 1 << 44, 1 << 56]))
    elif way == "lost":
        del recording.steps[at], recording.addresses[at]
    elif way == "limit":
        rules = replace(rules, limit=data.draw(st.integers(1, 300)) * MIB)
    rules = replace(rules, order=data.draw(st.sampled_from([0, 1, 2, 3, 50])))
    assert_equal(recording, rules)


def test_a_block_that_lies_elsewhere_ends_the_following():
    """The step is named, and the replay goes on with segments of its own."""
    recording = record([(ALLOC, n, 30 * MIB, 0) for n in range(3)], LANES, Rules(), 0)
    recording.addresses[3] += 512
    found = assert_equal(recording, Rules())
    assert (found["departed_step"], found["peak_reserved"]) == (3, 90 * MIB)


# ---------------------------------------------------------------- orders of segments

SEGMENTS = 5  # 120 orders
QUARTERS = {MIB // 2: [MIB // 2, MIB // 2, MIB], 5 * MIB: [5 * MIB, 5 * MIB, 15 * MIB, 18 * MIB]}


@st.composite
def small_streams(draw):
    """A few full segments, of which pieces come and go: equal ones are free in several."""
    quarter = draw(st.sampled_from(list(QUARTERS)))
    alive = list(range(4 * draw(st.integers(2, 4))))
    steps: list[reference.Step] = [(ALLOC, number, quarter, 0) for number in alive]
    for number in range(len(alive), len(alive) + draw(st.integers(6, 30))):
        if draw(st.integers(0, 9)) < 4:
            alive.append(number)
            lane = draw(st.sampled_from([0, 0, 0, 0, 1]))
            steps.append((ALLOC, number, draw(st.sampled_from(QUARTERS[quarter])), lane))
        elif alive:
            gone = alive.pop(draw(st.integers(0, len(alive) - 1)))
            steps.append((FREE_COMPLETED, gone, 0, 0))
    return steps


SMALL = st.tuples(
    small_streams(),
    st.builds(
        Rules,
        max_split_size=st.sampled_from([NONE, NONE, 20 * MIB]),
        gc_threshold=st.sampled_from([0.0, 0.0, 0.5]),
        limit=st.sampled_from([NONE, NONE, 90 * MIB]),
        expandable_segments=st.sampled_from([False, False, False, True]),
    ),
)


def in_all_orders(steps, rules):
    try:
        return reference.in_all_orders(steps, LANES, rules, SEGMENTS)
    except IndexError:
        assume(False)


@settings(max_examples=by_tier(40, 200, 2000), deadline=None)
@given(SMALL)
def test_the_answer_for_all_orders_is_that_of_brute_force(case):
    """The least and the most that is reserved, and whether a request fails, over every order."""
    steps, rules = case
    each = in_all_orders(steps, rules)
    found = core.replay_orders(table(steps), asdict(rules), 5000, False)
    assert found["are_all"]
    fails = [one["failed_step"] >= 0 for one in each]
    peaks = [one["peak_reserved"] for one, failed in zip(each, fails, strict=True) if not failed]
    assert (found["failed"] > 0, found["failed"] < found["orders"]) == (any(fails), not all(fails))
    if peaks:
        assert (found["lowest_peak"], found["highest_peak"]) == (min(peaks), max(peaks))


@settings(max_examples=by_tier(40, 200, 2000), deadline=None)
@given(SMALL)
def test_a_replay_that_says_the_order_does_not_matter_is_right(case):
    """Where no choice depends on addresses, every order counts the same."""
    steps, rules = case
    found = core.replay(table(steps), asdict(rules), False)
    assume(not found["order_matters"])
    each = in_all_orders(steps, rules)
    for name in ("peak_reserved", "peak_allocated", "retries", "failed_step", "reserved"):
        assert {one[name] for one in each} == {found[name]}


@settings(max_examples=by_tier(40, 200, 2000), deadline=None)
@given(SMALL)
def test_a_few_orders_give_an_interval_inside_that_of_all(case):
    """An interval over some orders lies inside the interval over all of them."""
    steps, rules = case
    each = in_all_orders(steps, rules)
    found = core.replay_orders(table(steps), asdict(rules), 3, False)
    peaks = [one["peak_reserved"] for one in each if one["failed_step"] < 0]
    if found["failed"] < found["orders"]:
        assert min(peaks) <= found["lowest_peak"] <= found["highest_peak"] <= max(peaks)


@pytest.mark.parametrize("spread", [True, False])
def test_the_small_streams_reach_answers_that_depend_on_the_order(spread):
    """Else the tests above would hold anything."""

    def wanted(case):
        steps, rules = case
        found = core.replay_orders(table(steps), asdict(rules), 500, False)
        differs = found["lowest_peak"] < found["highest_peak"]
        return found["are_all"] and found["orders"] > 3 and differs == spread

    only = settings(max_examples=4000, phases=[Phase.generate], derandomize=True, database=None)
    find(SMALL, wanted, settings=only)
