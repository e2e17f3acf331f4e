"""Recordings of the plain allocator: what it asked, what its driver gave, and where each block lay."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests import allocator_reference as reference
from tests.allocator_reference import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    GIVEN,
    HELD,
    REFUSED,
    SEED,
    TRIM,
    Allocator,
    Block,
    BlockPool,
    OutOfMemory,
    Rules,
    Step,
)
from tests.driver_reference import Driver


@dataclass
class Recording:
    """Steps with the driver's, the address of each, and what the allocator counted."""

    steps: list[Step]
    addresses: list[int]
    counted: dict[str, int]


class _Recorder(Allocator):
    """An allocator whose driver gives segments anywhere, and that writes down what it gave."""

    def __init__(self, rules: Rules, seed: int) -> None:
        super().__init__(rules, Driver(0))
        self.rows: list[tuple[Step, int]] = []
        self.places = random.Random(seed).sample(range(1, 4096), 400)

    def _address(self) -> int:
        return self.places.pop() << 44

    def place(self, size: int) -> tuple[int, int]:
        address = self._address()
        self.rows.append(((GIVEN, 0, size, 0), address))
        return address, address

    def find_expandable_block(self, pool: BlockPool, size: int, stream: int) -> Block:
        self.next_expandable = self._address()
        return super().find_expandable_block(pool, size, stream)

    def map_block(self, to_map: Block, size: int) -> bool:
        page, before = self.page(to_map.pool), self.counted["reserved"]
        address = to_map.segment + (to_map.ptr - to_map.segment) // page * page
        mapped = super().map_block(to_map, size)
        if mapped:
            self.rows.append(((GIVEN, 0, self.counted["reserved"] - before, 0), address))
        return mapped

    def driver_gives(self, size: int) -> bool:
        gives = super().driver_gives(size)
        if not gives:
            self.rows.append(((REFUSED, 0, 0, 0), 0))
        return gives


def record(
    steps: Sequence[Step], lanes: list[tuple[int, int]], rules: Rules, seed: int, late: int = 0
) -> Recording:
    """Records these steps, without the first `late` ones, up to a request that fails."""
    allocator = _Recorder(rules, seed)
    held: dict[int, Block] = {}
    for i, (kind, number, size, lane) in enumerate(steps):
        if i == late:
            allocator.rows = _before(held, allocator, lanes)
            for name in ("reserved", "allocated", "active"):
                allocator.counted[f"peak_{name}"] = allocator.counted[name]
        block = held.get(number)
        if kind == ALLOC:
            counted, count = dict(allocator.counted), len(allocator.rows)
            try:
                held[number] = allocator.malloc(size, *lanes[lane])
            except OutOfMemory:  # what came before it is the recording
                allocator.counted, allocator.rows = counted, allocator.rows[:count]
                break
            held[number].holder = number
            allocator.rows.append(((kind, number, size, lane), held[number].ptr))
            continue
        allocator.rows.append(((kind, number, size, lane), 0))
        if kind == TRIM:
            allocator.trim(lanes[lane][1])
        elif block is not None and block.holder == number:
            if block.allocated:
                allocator.free(block)
            if kind == FREE_COMPLETED:
                allocator.free_block(block)
        if kind == FREE_COMPLETED:
            held.pop(number, None)
    rows = [row for row in allocator.rows if row[0][0] != REFUSED or _refuses(rules)]
    return Recording([step for step, _ in rows], [at for _, at in rows], dict(allocator.counted))


def _refuses(rules: Rules) -> bool:
    return rules.capacity != reference.NONE


def _before(held: dict[int, Block], allocator: Allocator, lanes: list[tuple[int, int]]) -> list:
    """The segments and blocks that are there, by address."""
    blocks = [b for pool in allocator.pools.values() for b in pool.blocks] + [*held.values()]
    heads = {id(head): head for head in map(_head, blocks)}
    rows = []
    for head in sorted(heads.values(), key=lambda block: block.ptr):
        lane = lanes.index((head.stream, head.pool.owner))
        inside = [head]
        while inside[-1].next is not None:
            inside.append(inside[-1].next)
        rows.append(((HELD, 0, sum(b.size for b in inside), lane), head.ptr))
        rows += [((SEED, b.holder, b.size, lane), b.ptr) for b in inside if b.allocated]
    return rows


def _head(block: Block) -> Block:
    while block.prev is not None:
        block = block.prev
    return block


__all__ = ["FREE_REQUESTED", "Recording", "record"]
