"""Block sizes follow from addresses: against a small model of torch's CUDA allocator."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

from pytracer.analysis.allocator import blocks
from pytracer.analysis.answers import breakdown
from pytracer.analysis.facts import usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.export.table import render
from tests.trace_builder import Block, TraceBuilder

KIB, MIB = 2**10, 2**20


@dataclass
class Piece:
    """A block of a segment, in use or free."""

    address: int
    size: int
    used: bool = False


class Allocator:
    """Best fit in segments, rounding, splitting and merging as c10/cuda/CUDACachingAllocator."""

    def __init__(self, b: TraceBuilder) -> None:
        self.b = b
        self.segments: dict[bool, list[list[Piece]]] = {True: [], False: []}  # by "small"
        self.next_segment = 1 << 40
        self.given: dict[int, int] = {}  # address to block size, of blocks in use
        self.history: list[int] = []  # block sizes in the order of the allocs

    def alloc(self, size: int, *, seed: bool = False) -> Block:
        rounded = max(512, -(-size // 512) * 512)
        small = rounded <= MIB
        free = [
            (piece.size, piece.address, segment, piece)
            for segment in self.segments[small]
            for piece in segment
            if not piece.used and piece.size >= rounded
        ]
        if not free:
            self.grow(rounded, small, seed)
            return self.alloc(size, seed=seed)
        _, address, segment, piece = min(free, key=lambda found: found[:2])
        rest = piece.size - rounded
        if rest >= 512 if small else rest > MIB:
            segment.insert(segment.index(piece) + 1, Piece(address + rounded, rest))
            piece.size = rounded
        piece.used = True
        self.given[address] = piece.size
        self.history.append(piece.size)
        if seed:
            return Block(address, size, 0)
        return self.b.alloc(size, address=address, device="cuda:0")

    def grow(self, rounded: int, small: bool, seed: bool) -> None:
        size = 2 * MIB if small else 20 * MIB if rounded < 10 * MIB else -(-rounded // (2 * MIB))
        size = size if size > 1000 else size * 2 * MIB
        self.segments[small].append([Piece(self.next_segment, size)])
        action = "seed_segment" if seed else "segment_alloc"
        place = self.b._block(size, self.next_segment, device="cuda:0")
        self.b._event(action, place, size)
        self.next_segment += size  # segments may touch

    def free(self, block: Block, *, silently: bool = False) -> None:
        if not silently:
            self.b.free(block, requested=True)
        del self.given[block.address]
        for segment in (*self.segments[True], *self.segments[False]):
            for piece in segment:
                if piece.address == block.address and piece.used:
                    piece.used = False
                    self.merge(segment)
                    return

    def merge(self, segment: list[Piece]) -> None:
        at = 0
        while at + 1 < len(segment):
            if segment[at].used or segment[at + 1].used:
                at += 1
            else:
                segment[at].size += segment.pop(at + 1).size

    def counters(self) -> dict[str, dict[str, dict[str, int]]]:
        return {"end": {"cuda:0": {"allocated_bytes.current": sum(self.given.values())}}}


def random_run(seed: int, *, old: int = 0) -> tuple[TraceBuilder, Allocator]:
    draw = random.Random(seed)
    b = TraceBuilder()
    b.snapshot(device="cuda:0")
    allocator = Allocator(b)
    sizes = (1, 512, 700 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB + 100, 19 * MIB, 30 * MIB + 5)
    before = [allocator.alloc(draw.choice(sizes), seed=True) for _ in range(old)]
    for block in [block for block in before if draw.random() < 0.5]:
        allocator.free(block, silently=True)
        before.remove(block)
    for block in before:
        place = b._block(block.size, block.address, device="cuda:0")
        b._event("seed", place, block.size)
    live = [Block(block.address, block.size, 1) for block in before]
    for _ in range(300):
        if live and draw.random() < 0.48:
            allocator.free(live.pop(draw.randrange(len(live))))
        else:
            live.append(allocator.alloc(draw.choice(sizes)))
    b.meta["counters"] = allocator.counters()
    return b, allocator


@pytest.mark.parametrize("seed", range(10))
def test_blocks_are_as_the_allocator_made_them(seed: int) -> None:
    b, allocator = random_run(seed)
    assert blocks.allocated_bytes(b.trace()).tolist() == allocator.history


@pytest.mark.parametrize("seed", range(10))
def test_blocks_from_before_the_trace_are_known_too(seed: int) -> None:
    b, allocator = random_run(seed, old=40)
    trace = b.trace()
    found = blocks.allocated_bytes(trace)
    assert (found != blocks.UNKNOWN).all()
    recorded = allocations(trace).start >= 0
    assert found[recorded].tolist() == allocator.history[40:]


@pytest.mark.parametrize("old", [0, 40])
def test_allocated_and_reserved_are_kept_apart(old: int) -> None:
    b, allocator = random_run(3, old=old)
    trace = b.trace()
    end = len(trace.events.ticks) - 1
    found = blocks.device_bytes(trace, usage.alive(trace, "end"), end, "cuda:0")
    pieces = [
        piece for kind in (True, False) for segment in allocator.segments[kind] for piece in segment
    ]
    assert found.allocated == sum(piece.size for piece in pieces if piece.used)
    assert found.reserved == sum(piece.size for piece in pieces)
    assert found.requested <= found.allocated <= found.reserved


def test_the_table_names_rounding_and_cache() -> None:
    b, _ = random_run(0)
    line = next(row for row in render(b.trace()).splitlines() if row.startswith("allocator"))
    assert "rounds up by " in line
    assert "caches " in line


def test_what_the_allocator_counts_otherwise_is_not_claimed() -> None:
    b, _ = random_run(0)
    b.meta["counters"]["end"]["cuda:0"]["allocated_bytes.current"] += 512
    assert set(blocks.allocated_bytes(b.trace())) == {blocks.UNKNOWN}
    assert breakdown.allocations_frame(b.trace()).allocated_bytes.isna().all()


@pytest.mark.parametrize("counters", [None, {}, {"end": None}, {"end": {"cuda:0": "?"}}, 7])
def test_without_the_allocators_word_nothing_is_claimed(counters: object) -> None:
    b, _ = random_run(0)
    b.meta["counters"] = counters
    assert set(blocks.allocated_bytes(b.trace())) == {blocks.UNKNOWN}


def test_the_cpu_gives_what_is_asked_for() -> None:
    b = TraceBuilder()
    b.alloc(100)
    b.alloc(100, device="cuda:0")
    assert blocks.allocated_bytes(b.trace()).tolist() == [100, blocks.UNKNOWN]


def test_expandable_segments_always_split() -> None:
    b = TraceBuilder()
    place = b._block(20 * MIB, 1 << 40, device="cuda:0")
    b._event("segment_map", place, 20 * MIB)
    b.alloc(19 * MIB + 600 * KIB, address=1 << 40, device="cuda:0")
    b.meta["counters"] = {"end": {"cuda:0": {"allocated_bytes.current": 19 * MIB + 600 * KIB}}}
    assert np.array_equal(blocks.allocated_bytes(b.trace()), [19 * MIB + 600 * KIB])
