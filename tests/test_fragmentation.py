"""What CUDA's allocator holds and cannot use, rebuilt from events: by hand, and against a model."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pytracer import errors, trace
from pytracer.analysis.allocator import fragmentation
from pytracer.analysis.allocator.fragmentation import Layout
from tests.test_analysis_blocks import random_run
from tests.trace_builder import Block, TraceBuilder

KIB, MIB = 2**10, 2**20
BASE = 1 << 40


class Device:
    """Events of one CUDA device, said with addresses in MiB from the first segment's."""

    def __init__(self) -> None:
        self.b = TraceBuilder()
        self.b.snapshot(device="cuda:0")
        self.live = 0

    def segment(self, at: float, size: float, action: str = "segment_alloc", **place: Any) -> None:
        block = self.b._block(int(size * MIB), BASE + int(at * MIB), device="cuda:0", **place)
        self.b._event(action, block, block.size)

    def alloc(self, at: float, size: float, **place: Any) -> Block:
        self.live += int(size * MIB)
        address = BASE + int(at * MIB)
        return self.b.alloc(int(size * MIB), address=address, device="cuda:0", **place)

    def free(self, block: Block) -> None:
        self.live -= block.size
        self.b.free(block, requested=True)

    def oom(self, size: float, left: float) -> None:
        place = self.b._block(0, int(left * MIB), device="cuda:0")
        self.b._event("oom", place, int(size * MIB))

    def layout(self, at: Any = "end", request: int | None = None) -> Layout:
        self.b.meta["counters"] = {"end": {"cuda:0": {"allocated_bytes.current": self.live}}}
        found = fragmentation.layout(self.b.trace(), at, "cuda:0", request)
        assert found is not None
        return found


def holes() -> Device:
    """Three segments of 100 MiB with 40, 30 and 30 MiB free between blocks, and a small one."""
    d = Device()
    for number in range(3):
        d.segment(number * 200, 100)
    d.segment(1000, 2)
    d.alloc(0, 60)
    d.alloc(200, 30)
    middle = d.alloc(230, 30)
    d.alloc(260, 40)
    d.alloc(400, 70)
    d.alloc(1000, 0.5)
    d.free(middle)
    return d


# ---------------------------------------------------------------- by hand


def test_what_lies_between_the_blocks_is_free() -> None:
    found = holes().layout()
    assert [[(a - BASE, s) for a, s in segment.gaps] for segment in found.segments] == [
        [(60 * MIB, 40 * MIB)],
        [(230 * MIB, 30 * MIB)],
        [(470 * MIB, 30 * MIB)],
        [(1000 * MIB + 512 * KIB, 1536 * KIB)],
    ]
    assert found.reserved == 302 * MIB
    assert found.free == 101.5 * MIB


def test_a_request_uses_one_gap_of_its_own_pool() -> None:
    """40 MiB fit into the first gap, 30 MiB into three; the small pool serves neither."""
    d = holes()
    assert d.layout(request=35 * MIB).usable == 40 * MIB
    assert d.layout(request=30 * MIB).usable == 100 * MIB
    assert d.layout(request=41 * MIB).usable == 0
    assert d.layout(request=41 * MIB).unusable == 101.5 * MIB
    assert d.layout(request=1 * MIB).usable == 1.5 * MIB
    assert d.layout(request=1 * MIB).largest_gap == 1.5 * MIB


def test_a_request_is_rounded_as_the_allocator_rounds_it() -> None:
    assert holes().layout(request=40 * MIB).usable == 40 * MIB
    assert holes().layout(request=40 * MIB + 1).usable == 0


def test_the_largest_request_of_the_trace_is_the_default() -> None:
    found = holes().layout()
    assert found.request is not None
    assert found.request.bytes == 70 * MIB
    assert found.unusable == found.free


def test_a_gap_of_another_stream_or_private_pool_is_no_use() -> None:
    d = Device()
    d.segment(0, 100)
    d.segment(200, 100, stream=7)
    d.segment(400, 100, pool=3)
    d.alloc(0, 90)
    d.alloc(200, 50, stream=7)
    d.alloc(400, 50, pool=3)
    found = d.layout(request=40 * MIB)
    assert found.free == 110 * MIB
    assert found.usable == 0
    assert [segment.lane.private_pool for segment in found.segments] == ["", "", "0.3"]
    assert [segment.lane.stream for segment in found.segments] == [0, 7, 0]


def test_pages_that_are_free_as_a_whole_are_what_expandable_segments_give_back() -> None:
    """Of 40 and 30 MiB free, 20 MiB pages: 60-100 has two; 230-260 one (240 is 40 in); 470-500
    one, 480-500. A request of 70 MiB needs four pages; the small segment has none."""
    found = holes().layout()
    assert [segment.free_pages for segment in found.segments] == [
        40 * MIB,
        20 * MIB,
        20 * MIB,
        0,
    ]
    assert found.expandable_would_help is True
    assert holes().layout(request=81 * MIB).expandable_would_help is False
    assert holes().layout(request=30 * MIB).expandable_would_help is False  # no help needed


def test_a_failed_request_is_looked_at_before_it_failed() -> None:
    d = holes()
    d.oom(90, left=25)
    d.free(d.b.alloc(5, address=BASE + 2**45, device="cuda:0"))
    d.live = 200 * MIB + 512 * KIB
    found = d.layout("oom")
    assert found.request is not None
    assert (found.request.bytes, found.device_free) == (90 * MIB, 25 * MIB)
    assert found.usable == 0
    assert found.expandable_would_help is True  # 80 MiB of pages and 25 MiB left make 100


def test_under_a_limit_the_device_has_less_left_than_it_says() -> None:
    """302 MiB are held and 310 allowed: 8 MiB and 80 MiB of pages do not make 90."""
    d = holes()
    d.oom(90, left=5000)
    assert d.layout("oom").expandable_would_help is True
    d.b.meta["device_memory"] = {"allowed": {"cuda:0": 310 * MIB}}
    assert d.layout("oom").device_free == 8 * MIB
    assert d.layout("oom").expandable_would_help is False


def test_without_a_failed_request_there_is_no_such_moment() -> None:
    with pytest.raises(errors.UsageError, match="no request failed on cuda:0"):
        holes().layout("oom")


@pytest.mark.parametrize("request_", [0, -1])
def test_a_request_is_positive(request_: int) -> None:
    with pytest.raises(errors.UsageError, match="positive number of bytes"):
        holes().layout(request=request_)


def test_segments_come_and_go() -> None:
    d = holes()
    d.segment(400, 100, "segment_free")
    assert len(d.layout().segments) == 3
    assert d.layout().reserved == 202 * MIB


def test_expandable_segments_grow_and_lose_pages_in_the_middle() -> None:
    d = Device()
    d.segment(0, 40, "segment_map")
    d.segment(40, 60, "segment_map")
    d.segment(1000, 2, "segment_map")
    kept = d.alloc(0, 15)
    d.alloc(80, 20)
    d.segment(20, 40, "segment_unmap")
    found = d.layout()
    assert [(s.address - BASE, s.bytes) for s in found.segments] == [
        (0, 20 * MIB),
        (60 * MIB, 40 * MIB),
        (1000 * MIB, 2 * MIB),
    ]
    assert [s.free_bytes for s in found.segments] == [5 * MIB, 20 * MIB, 2 * MIB]
    assert [s.lane.pool for s in found.segments] == ["large", "large", "small"]
    assert found.expandable_would_help is None
    d.free(kept)
    assert d.layout().free == 42 * MIB


def test_unmapping_across_pieces_takes_a_part_of_each() -> None:
    d = Device()
    d.segment(0, 40, "segment_map")
    d.segment(40, 40, "segment_map")
    d.alloc(0, 20)
    d.alloc(60, 20)
    d.segment(20, 40, "segment_unmap")
    assert [(s.address - BASE, s.bytes) for s in d.layout().segments] == [
        (0, 20 * MIB),
        (60 * MIB, 20 * MIB),
    ]


def test_segments_that_touch_are_not_one_unless_they_are_expandable() -> None:
    d = Device()
    d.segment(0, 20)
    d.segment(20, 20)
    d.alloc(0, 10)
    found = d.layout(request=25 * MIB)
    assert [s.largest_gap for s in found.segments] == [10 * MIB, 20 * MIB]
    assert found.usable == 0


def test_an_empty_segment_larger_than_2_mib_is_a_large_pools() -> None:
    d = Device()
    d.segment(0, 12)
    d.segment(100, 2)
    d.segment(200, 2)
    d.alloc(200, 1)
    found = d.layout(request=11 * MIB)
    assert [segment.lane.pool for segment in found.segments] == ["large", "small", "small"]
    assert found.usable == 12 * MIB


def test_expandable_segments_that_grew_before_the_trace_are_known_by_the_settings() -> None:
    """A warm program maps nothing: what it asked for tells. The 40 MiB seed is one arena's."""
    d = Device()
    d.segment(0, 40, "seed_segment")
    d.segment(100, 4, "seed_segment")
    d.alloc(0, 19.5)
    assert d.layout().expandable is False
    d.b.meta["allocator_settings"] = "expandable_segments: True"
    found = d.layout()
    assert found.expandable
    assert [s.lane.pool for s in found.segments] == ["large", "small"]
    assert found.segments[0].gaps == ((BASE + int(19.5 * MIB), int(20.5 * MIB)),)


def test_gaps_are_counted_by_size() -> None:
    sizes = fragmentation.gap_sizes(holes().layout())
    assert sizes == [
        (2 * MIB, 1, 1536 * KIB),
        (32 * MIB, 2, 60 * MIB),
        (128 * MIB, 1, 40 * MIB),
    ]


def test_the_table_has_a_row_per_segment_and_the_worst_first() -> None:
    table = fragmentation.frame(holes().layout(request=35 * MIB))
    assert table.unusable.tolist() == [30 * MIB, 30 * MIB, 1536 * KIB, 0]
    assert (table.bytes == table.used + table.free).all()
    assert table.attrs["unusable"] == table.unusable.sum()


def test_what_is_not_known_is_not_made_up() -> None:
    """No snapshot, or blocks of unknown size: an empty table."""
    b = TraceBuilder()
    b.alloc(100, device="cuda:0")
    assert fragmentation.layout(b.trace(), "end") is None
    assert fragmentation.frame(None).empty
    d = holes()
    d.b.meta["counters"] = {"end": {"cuda:0": {"allocated_bytes.current": 7}}}
    assert fragmentation.layout(d.b.trace(), "end") is None


def test_the_cpus_allocator_has_no_segments() -> None:
    b = TraceBuilder()
    b.alloc(100)
    assert fragmentation.layout(b.trace(), "end") is None


# ---------------------------------------------------------------- against models


@pytest.mark.parametrize("old", [0, 40])
@pytest.mark.parametrize("seed", range(5))
def test_gaps_are_the_allocators_free_pieces(seed: int, old: int) -> None:
    """A model of torch's allocator, which merges neighbours, has the same free pieces."""
    b, allocator = random_run(seed, old=old)
    found = fragmentation.layout(b.trace(), "end")
    assert found is not None
    expected = {
        (piece.address, piece.size)
        for segments in allocator.segments.values()
        for segment in segments
        for piece in segment
        if not piece.used
    }
    assert {gap for segment in found.segments for gap in segment.gaps} == expected


UNIT = 2 * MIB


@st.composite
def mapped_runs(draw: st.DrawFn) -> tuple[TraceBuilder, set[int], set[int]]:
    """Maps, unmaps, allocs and frees in units; returns which units are mapped, and used."""
    b = TraceBuilder()
    b.snapshot(device="cuda:0")
    mapped: set[int] = set()
    used: dict[int, tuple[Block, int]] = {}
    far = b.alloc(UNIT, address=BASE * 2, device="cuda:0")  # the device is in the trace
    b.free(far, requested=True)
    for _ in range(draw(st.integers(1, 40))):
        first, length = draw(st.integers(0, 24)), draw(st.integers(1, 6))
        units = set(range(first, first + length))
        taken = {u for start, (_, n) in used.items() for u in range(start, start + n)}
        place = b._block(length * UNIT, BASE + first * UNIT, device="cuda:0")
        what = draw(st.sampled_from(["map", "unmap", "alloc", "free"]))
        if what == "map" and not units & mapped:
            b._event("segment_map", place, length * UNIT)
            mapped |= units
        elif what == "unmap" and units <= mapped and not units & taken:
            b._event("segment_unmap", place, length * UNIT)
            mapped -= units
        elif what == "alloc" and units <= mapped and not units & taken:
            address = BASE + first * UNIT
            block = b.alloc(length * UNIT, address=address, device="cuda:0")
            used[first] = (block, length)
        elif what == "free" and used:
            block, _ = used.pop(draw(st.sampled_from(sorted(used))))
            b.free(block, requested=True)
    taken = {u for start, (_, n) in used.items() for u in range(start, start + n)}
    b.meta["counters"] = {"end": {"cuda:0": {"allocated_bytes.current": len(taken) * UNIT}}}
    return b, mapped, taken


@pytest.mark.ci
@settings(max_examples=150)
@given(mapped_runs())
def test_gaps_are_what_is_mapped_and_not_used(run: tuple[TraceBuilder, set[int], set[int]]) -> None:
    """The slow reference: a set of 2 MiB units."""
    b, mapped, taken = run
    found = fragmentation.layout(b.trace(), "end", "cuda:0")
    assert found is not None
    units = [
        (address - BASE) // UNIT + i
        for segment in found.segments
        for address, size in segment.gaps
        for i in range(size // UNIT)
    ]
    assert sorted(units) == sorted(mapped - taken)
    assert len(units) == len(set(units))
    assert found.reserved == len(mapped) * UNIT


# ---------------------------------------------------------------- on the device


def shake(count: int = 200) -> list[torch.Tensor]:
    """Many sizes on two streams, every third freed: leaves gaps everywhere."""
    sizes = [(i * 7919) % 9_000_000 + 1 for i in range(count)]
    side = torch.cuda.Stream()
    kept = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    with torch.cuda.stream(side):
        kept += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes[:50]]
    return [block for i, block in enumerate(kept) if i % 3]


@pytest.mark.cuda
def test_every_gap_is_the_allocators_own_to_the_byte() -> None:
    """torch.cuda.memory_snapshot() at the end has the same segments and the same free blocks."""
    with trace(devices="cuda") as t:
        kept = shake()
        torch.cuda.synchronize()
    found = fragmentation.layout(t.data, "end", "cuda:0")
    assert found is not None
    theirs = {}
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != 0:
            continue
        at, gaps = segment["address"], []
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                gaps.append((at, block["size"]))
            at += block["size"]
        theirs[segment["address"], segment["total_size"]] = (
            tuple(gaps),
            segment["segment_type"],
            segment["stream"],
        )
    ours = {(s.address, s.bytes): (s.gaps, s.lane.pool, s.lane.stream) for s in found.segments}
    assert ours == theirs
    assert kept


@pytest.mark.cuda
def test_a_request_that_failed_is_explained() -> None:
    """Under a limit of 400 MiB: every second of six 50 MiB blocks freed, and 120 MiB asked for."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + 400 * MIB) / total, 0
    )
    try:
        with trace(devices="cuda") as t:
            whole = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
            del whole  # one segment, from which the blocks are cut
            blocks = [torch.empty(50 * MIB, dtype=torch.uint8, device="cuda") for _ in range(6)]
            del blocks[::2]
            with pytest.raises(torch.cuda.OutOfMemoryError):
                torch.empty(120 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    found = t.fragmentation("oom").attrs
    assert found["request"] == 120 * MIB
    assert found["usable"] == 0
    assert found["largest_gap"] >= 50 * MIB
    assert found["device_free"] <= 100 * MIB
    assert found["expandable_would_help"] is True  # three times 40 MiB of pages, and what is left
