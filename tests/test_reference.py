"""The plain-Python lifetimes: one test per rule. The same rules are tested in C++."""

from typing import Any

import numpy as np
from hypothesis import given

from pytracer.data.schema import ACTION
from tests.lifetimes_reference import COUNTERS, Lifetimes, live_bytes, match_lifetimes
from tests.strategies import (
    CPU,
    CUDA,
    CUDA_STREAM_7,
    DEVICES,
    OTHER_CUDA,
    PLACES,
    hostile_events,
    make_events,
    valid_events,
)


def match(*rows: tuple[Any, ...]) -> Lifetimes:
    """Lifetimes of rows of (action, address, bytes=0, place=CPU)."""
    filled = [(ACTION.get(row[0], row[0]), *row[1:], *(0, CPU)[len(row) - 2 :]) for row in rows]
    return match_lifetimes(make_events(filled), PLACES)


def counted(found: Lifetimes) -> dict[str, int]:
    return {name: count for name, count in found.counters.items() if count}


def test_no_events_no_allocations():
    found = match()
    assert len(found.start) == 0
    assert tuple(found.counters) == COUNTERS


def test_on_the_cpu_use_ends_when_the_bytes_are_reusable():
    found = match(("alloc", 64, 10), ("free_completed", 64, 10))
    assert (*found.start, *found.end, *found.completed) == (0, 1, 1)
    assert list(found.bytes) == [10]
    assert list(found.allocation_of_event) == [0, 0]
    assert counted(found) == {}


def test_on_cuda_use_ends_before_the_bytes_are_reusable():
    found = match(
        ("alloc", 64, 10, CUDA), ("free_requested", 64, 10, CUDA), ("free_completed", 64, 10, CUDA)
    )
    assert (*found.start, *found.end, *found.completed) == (0, 1, 2)
    assert counted(found) == {}


def test_a_live_block_has_no_end():
    found = match(("alloc", 64, 10))
    assert (*found.end, *found.completed) == (-1, -1)


def test_an_address_that_comes_again_is_another_allocation():
    found = match(("alloc", 64, 10), ("free_completed", 64), ("alloc", 64, 20))
    assert list(found.start) == [0, 2]
    assert list(found.completed) == [1, -1]
    assert counted(found) == {}


def test_the_same_address_on_two_devices_is_two_blocks():
    found = match(
        ("alloc", 64, 10, CPU),
        ("alloc", 64, 20, CUDA),
        ("alloc", 64, 30, OTHER_CUDA),
        ("free_completed", 64, 20, CUDA),
    )
    assert list(found.completed) == [-1, 3, -1]


def test_a_block_may_be_freed_from_another_stream():
    found = match(("alloc", 64, 10, CUDA), ("free_completed", 64, 10, CUDA_STREAM_7))
    assert list(found.completed) == [1]
    assert list(found.place) == [CUDA]


def test_an_alloc_at_a_live_address_ends_the_earlier_block():
    found = match(("alloc", 64, 10), ("alloc", 64, 20), ("free_completed", 64))
    assert list(found.end) == [1, 2]
    assert list(found.completed) == [1, 2]
    assert list(found.allocation_of_event) == [0, 1, 1]
    assert counted(found) == {"implicit_frees": 1}


def test_an_implicit_free_keeps_the_end_that_was_requested():
    found = match(("alloc", 64, 10), ("free_requested", 64), ("alloc", 64, 20))
    assert list(found.end) == [1, -1]
    assert list(found.completed) == [2, -1]


def test_a_free_of_an_unknown_block_is_counted():
    found = match(("free_requested", 64), ("free_completed", 64), ("free_completed", 64))
    assert list(found.allocation_of_event) == [-1, -1, -1]
    assert counted(found) == {"unmatched_free_requests": 1, "frees_from_before": 2}


def test_a_snapshot_makes_the_unknown_frees_of_its_own_device_a_surprise_and_no_others():
    frees = [("free_completed", 64, 10, CUDA), ("free_completed", 64, 10, OTHER_CUDA)]
    found = match(("snapshot", 0, 0, CUDA), *frees, ("free_completed", 64))
    assert counted(found) == {"unmatched_frees": 1, "frees_from_before": 2}


def test_a_second_free_request_is_counted_and_changes_nothing():
    found = match(("alloc", 64, 10), ("free_requested", 64), ("free_requested", 64))
    assert list(found.end) == [1]
    assert counted(found) == {"repeated_free_requests": 1}


def test_labels_and_saves_find_the_block_at_their_address():
    found = match(("alloc", 64, 10), ("label", 64, 3), ("saved", 64, 4))
    assert list(found.allocation_of_event) == [0, 0, 0]
    assert counted(found) == {}


def test_a_label_inside_a_block_finds_it():
    found = match(
        ("alloc", 100, 10),
        ("alloc", 200, 10),
        ("label", 109),
        ("label", 110),
        ("saved", 205),
        ("saved", 99),
    )
    assert list(found.allocation_of_event) == [0, 1, 0, -1, 1, -1]
    assert counted(found) == {"unmatched_labels": 1, "unmatched_saves": 1}


def test_a_block_on_its_way_out_can_still_be_labelled():
    found = match(("alloc", 64, 10), ("free_requested", 64), ("saved", 64), ("saved", 70))
    assert list(found.allocation_of_event) == [0, 0, 0, 0]


def test_a_label_does_not_cross_devices():
    found = match(("alloc", 64, 10, CPU), ("label", 64, 1, CUDA), ("label", 65, 1, CUDA))
    assert counted(found) == {"unmatched_labels": 2}


def test_segments_ooms_and_snapshots_are_not_allocations():
    actions = ("segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom", "snapshot")
    found = match(*((action, 64, 10, CUDA) for action in (*reversed(actions), "seed_segment")))
    assert len(found.start) == 0
    assert counted(found) == {}


def test_a_device_starts_at_its_snapshot():
    found = match(
        ("alloc", 64, 10, CUDA),
        ("alloc", 64, 10, OTHER_CUDA),
        ("snapshot", 0, 0, CUDA),
        ("free_completed", 64, 10, CUDA),
    )
    assert list(found.start) == [1]
    assert counted(found) == {"before_snapshot": 1, "unmatched_frees": 1}


def test_seeds_were_alive_at_the_snapshot_even_when_written_later():
    found = match(
        ("snapshot", 0, 0, CUDA),
        ("alloc", 128, 5, CUDA),
        ("free_completed", 64, 10, CUDA),
        ("seed", 64, 10, CUDA),
        ("seed", 256, 20, CUDA_STREAM_7),
    )
    assert list(found.start) == [-1, -1, 1]
    assert list(found.completed) == [2, -1, -1]
    assert list(found.allocation_of_event) == [-1, 2, 0, 0, 1]
    assert counted(found) == {}


def test_with_a_snapshot_an_alloc_before_the_seed_does_not_make_it_a_duplicate():
    found = match(
        ("snapshot", 0, 0, CUDA),
        ("free_completed", 64, 10, CUDA),
        ("alloc", 64, 5, CUDA),
        ("seed", 64, 10, CUDA),
    )
    assert list(found.start) == [-1, 2]
    assert list(found.completed) == [1, -1]


def test_the_seeds_of_a_trace_inside_this_one_say_nothing_new():
    found = match(
        ("snapshot", 0, 0, CUDA),
        ("seed", 64, 10, CUDA),
        ("alloc", 128, 20, CUDA),
        ("snapshot", 0, 0, CUDA),
        ("seed", 64, 10, CUDA),
        ("seed", 128, 20, CUDA),
    )
    assert list(found.start) == [-1, 2]
    assert counted(found) == {"repeated_snapshots": 1, "duplicate_seeds": 2}


def test_a_seed_before_the_snapshot_is_not_one():
    found = match(("seed", 64, 10, CUDA), ("snapshot", 0, 0, CUDA))
    assert len(found.start) == 0
    assert counted(found) == {"before_snapshot": 1}


def test_a_second_snapshot_is_counted():
    found = match(("snapshot", 0, 0, CUDA), ("alloc", 64, 10, CUDA), ("snapshot", 0, 0, CUDA))
    assert list(found.start) == [1]
    assert counted(found) == {"repeated_snapshots": 1}


def test_a_cpu_seed_is_of_what_lives_and_not_of_what_was_freed_there():
    found = match(("free_completed", 64), ("alloc", 64, 10), ("seed", 64, 10), ("label", 64, 0))
    assert list(found.start) == [1]
    assert list(found.allocation_of_event) == [-1, 0, -1, 0]
    assert counted(found) == {"frees_from_before": 1, "duplicate_seeds": 1}


def test_a_cpu_seed_was_alive_before_the_recording():
    found = match(("alloc", 64, 10), ("seed", 128, 20), ("free_completed", 128))
    assert list(found.start) == [-1, 0]
    assert list(found.completed) == [2, -1]
    assert counted(found) == {}


def test_a_cpu_seed_where_another_block_was_freed_begins_there():
    """What copy.deepcopy makes is in no event: it is met where something else has been."""
    found = match(
        ("free_completed", 64),
        ("seed", 64, 10),
        ("alloc", 128, 5),
        ("free_completed", 128),
        ("seed", 128, 20),
        ("free_completed", 128),
    )
    assert list(found.start) == [1, 2, 4]
    assert list(found.completed) == [-1, 3, 5]
    assert list(found.bytes) == [10, 5, 20]
    assert counted(found) == {"frees_from_before": 1}


def test_a_cpu_seed_of_a_block_born_in_the_recording_is_ignored():
    found = match(
        ("alloc", 64, 10),
        ("seed", 64, 10),
        ("alloc", 128, 10),
        ("seed", 128, 10),
    )
    assert list(found.start) == [0, 2]
    assert list(found.allocation_of_event) == [0, -1, 1, -1]
    assert counted(found) == {"duplicate_seeds": 2}


def test_a_cpu_seed_before_the_alloc_is_an_earlier_block():
    found = match(("seed", 64, 10), ("free_completed", 64), ("alloc", 64, 20))
    assert list(found.start) == [-1, 2]
    assert counted(found) == {}


def test_two_seeds_of_one_block_are_one():
    found = match(("seed", 64, 10), ("seed", 64, 10))
    assert list(found.start) == [-1]
    assert counted(found) == {"duplicate_seeds": 1}


def test_rows_of_unknown_actions_and_places_are_counted():
    found = match((200, 64, 10), ("alloc", 64, 10, 9), ("seed", 64, 1, 9))
    assert len(found.start) == 0
    assert counted(found) == {"unknown_actions": 1, "unknown_places": 2}


def test_live_bytes_change_at_alloc_and_completed_free():
    found = match(
        ("alloc", 64, 10, CUDA),
        ("alloc", 128, 5, CUDA),
        ("free_requested", 64, 10, CUDA),
        ("alloc", 512, 100, CPU),
        ("free_completed", 64, 10, CUDA),
        ("alloc", 64, 1, CUDA_STREAM_7),
    )
    live = live_bytes(found, PLACES, DEVICES[CUDA])
    assert list(live.position) == [0, 1, 4, 5]
    assert list(live.bytes) == [10, 15, 5, 6]
    assert (live.at_start, live.peak, live.peak_position) == (0, 15, 1)


def test_live_bytes_begin_with_the_seeds():
    found = match(("seed", 64, 10), ("seed", 128, 20), ("free_completed", 64), ("alloc", 64, 10))
    live = live_bytes(found, PLACES, DEVICES[CPU])
    assert list(live.bytes) == [20, 30]
    assert (live.at_start, live.peak, live.peak_position) == (30, 30, -1)  # the first time


def test_an_implicit_free_is_one_change():
    live = live_bytes(match(("alloc", 64, 10), ("alloc", 64, 4)), PLACES, DEVICES[CPU])
    assert list(live.position) == [0, 1]
    assert list(live.bytes) == [10, 4]
    assert live.peak == 10


@given(valid_events())
def test_nothing_is_unmatched_in_what_an_allocator_can_record(events):
    found = match_lifetimes(events, PLACES)
    inner = {"repeated_snapshots", "duplicate_seeds"}  # of a trace inside of this one
    assert counted(found).keys() <= {"before_snapshot", *inner}
    assert counted(found).get("repeated_snapshots", 0) <= 1


@given(valid_events())
def test_allocated_minus_freed_is_live(events):
    found = match_lifetimes(events, PLACES)
    for device in set(DEVICES.values()):
        live = live_bytes(found, PLACES, device)
        mine = [
            (PLACES.device_type[place], PLACES.device_index[place]) == device
            for place in found.place
        ]
        alive = found.bytes[np.array(mine, dtype=bool) & (found.completed == -1)].sum()
        assert alive == (live.bytes[-1] if len(live.bytes) else live.at_start)
        assert live.peak >= max([live.at_start, *live.bytes.tolist()])


@given(hostile_events())
def test_every_lifetime_runs_forward_whatever_the_events(events):
    found = match_lifetimes(events, PLACES)
    born = found.start[found.start >= 0]
    assert (np.diff(born) > 0).all()
    assert ((found.completed == -1) | (found.completed >= found.end)).all()
    assert ((found.end == -1) | (found.end > found.start)).all()
    assert found.allocation_of_event.max(initial=-1) < len(found.start)
