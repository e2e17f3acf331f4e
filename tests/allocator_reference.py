"""torch's CUDA caching allocator in plain Python: the oracle of csrc/core/allocator_replay.cpp.

One function here is one function of c10/cuda/CUDACachingAllocator.cpp and has its name. All streams
share one list per pool, sorted anew at each change, as torch's one set per pool; nothing here is fast.

The driver, which torch's file does not have, is `driver_reference.Driver`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations

from tests.driver_reference import MIB, SMALL_BUFFER, Departed, Driver, round_up

MIN_BLOCK, SMALL_SIZE = 512, MIB
MIN_LARGE_ALLOC, ROUND_LARGE = 10 * MIB, 2 * MIB
NONE = 2**64 - 1
EXPANDABLE_BASE, ROOM = 1 << 58, 1 << 42

ALLOC, FREE_REQUESTED, FREE_COMPLETED, ATTEMPT, TRIM, HELD, SEED, GIVEN, REFUSED = range(9)


class OutOfMemory(Exception):
    """A request failed."""


@dataclass
class Rules:
    """As in `AllocatorRules`."""

    max_split_size: int = NONE
    max_non_split_rounding: int = 20 * MIB
    roundup_divisions: list[int] = field(default_factory=list)
    gc_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment_size: int = 20 * MIB
    limit: int = NONE
    capacity: int = NONE
    order: int = 0


@dataclass(eq=False)
class Block:
    stream: int
    size: int
    ptr: int
    pool: "BlockPool"
    prev: "Block | None" = None
    next: "Block | None" = None
    segment: int = 0
    allocated: bool = False
    event_count: int = 0
    mapped: bool = True
    gc_count_base: int = 0
    holder: int = -1  # the allocation that has it
    rank: int = 0  # of its segment: the lower one serves first

    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    def gc_count(self) -> int:
        return self.pool.calls - self.gc_count_base


@dataclass(eq=False)
class BlockPool:
    is_small: bool
    owner: int
    blocks: list[Block] = field(default_factory=list)
    unmapped: list[Block] = field(default_factory=list)
    calls: int = 0

    def insert_into_blocks(self, block: Block) -> None:
        block.gc_count_base = self.calls
        self.blocks.append(block)
        self.blocks.sort(key=lambda b: (b.stream, b.size, b.rank, b.ptr))

    def insert_into_unmapped(self, block: Block) -> None:
        self.unmapped.append(block)
        self.unmapped.sort(key=lambda b: (b.stream, b.ptr))

    def lower_bound(self, stream: int, size: int) -> int:
        key = (stream, size)
        return next(
            (i for i, b in enumerate(self.blocks) if (b.stream, b.size) >= key), len(self.blocks)
        )


class Allocator:
    """Of one device."""

    def __init__(self, rules: Rules, driver: Driver) -> None:
        self.rules, self.driver = rules, driver
        self.filled: Block | None = None  # the free end of the segment that seeds fill
        self.pools: dict[tuple[int, bool], BlockPool] = {}
        self.ended: set[int] = set()
        self.pending: list[Block] = []
        self.next_expandable = EXPANDABLE_BASE
        self.physical = 0
        self.step = -1
        names = ["retries", "device_allocs", "device_frees"]
        for name in ("reserved", "allocated", "active"):
            names += [name, f"peak_{name}"]
        self.counted = dict.fromkeys(names, 0) | {"departed_step": -1}

    # ------------------------------------------------------------ sizes

    def round_size(self, size: int) -> int:
        if size < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self.roundup_power2_divisions(size)
        if divisions > 1 and size > MIN_BLOCK * divisions:
            return self.roundup_power2_next_division(size, divisions)
        return round_up(size, MIN_BLOCK)

    def roundup_power2_divisions(self, size: int) -> int:
        if not self.rules.roundup_divisions:
            return 0
        index = max(0, size.bit_length() - 1 - 20)
        return self.rules.roundup_divisions[min(index, 15)]

    @staticmethod
    def roundup_power2_next_division(size: int, divisions: int) -> int:
        if size & (size - 1) == 0:
            return size
        power2_floor = 1 << (size.bit_length() - 1)
        power2_division = power2_floor >> (divisions.bit_length() - 1)
        if power2_division == 0:
            return power2_floor << 1
        round_size_floor = size & ~(power2_division - 1)
        return size if round_size_floor == size else round_size_floor + power2_division

    def get_allocation_size(self, size: int) -> int:
        if size <= SMALL_SIZE:
            return SMALL_BUFFER
        if size < MIN_LARGE_ALLOC:
            return self.rules.large_segment_size
        return round_up(size, ROUND_LARGE)

    def should_split(self, block: Block, size: int) -> bool:
        remaining = block.size - size
        if block.pool.is_small or self.rules.expandable_segments:
            return remaining >= MIN_BLOCK
        return size < self.rules.max_split_size and remaining > SMALL_SIZE

    def collects(self) -> bool:
        return self.rules.limit != NONE and self.rules.gc_threshold > 0

    # ------------------------------------------------------------ malloc and free

    def malloc(self, requested: int, stream: int, owner: int) -> Block:
        size = self.round_size(requested)
        key = (owner, size <= SMALL_SIZE)
        pool = self.pools.setdefault(key, BlockPool(key[1], owner))
        block = self.get_free_block(pool, size, stream)
        if block is None:
            if self.collects():
                self.garbage_collect_cached_blocks()
            block = self.alloc_block(pool, size, stream)
            if block is None and self.release_available_cached_blocks(pool, size, stream):
                block = self.alloc_block(pool, size, stream)
            if block is None and owner == 0:
                self.release_cached_blocks()
                self.counted["retries"] += 1
                block = self.alloc_block(pool, size, stream)
            if block is None:
                raise OutOfMemory(size)
        return self.alloc_found_block(pool, block, size)

    def alloc_found_block(self, pool: BlockPool, block: Block, size: int) -> Block:
        return self.occupy(self.cut(block, size) if self.should_split(block, size) else block)

    def cut(self, remaining: Block, size: int) -> Block:
        """The front of the block; the rest goes into its pool."""
        block = self.beside(remaining, size, remaining.ptr)
        block.prev = remaining.prev
        if block.prev is not None:
            block.prev.next = block
        block.next = remaining
        remaining.prev = block
        remaining.ptr += size
        remaining.size -= size
        remaining.pool.insert_into_blocks(remaining)
        return block

    @staticmethod
    def beside(other: Block, size: int, ptr: int) -> Block:
        """Another block of the same segment."""
        return Block(other.stream, size, ptr, other.pool, segment=other.segment, rank=other.rank)

    def occupy(self, block: Block) -> Block:
        block.allocated = True
        for name in ("allocated", "active"):
            self.counted[name] += block.size
            peak = f"peak_{name}"
            self.counted[peak] = max(self.counted[peak], self.counted[name])
        return block

    def free(self, block: Block) -> None:
        """An event keeps the block until `free_block`, also where torch would need none."""
        block.allocated = False
        block.event_count = 1
        self.counted["allocated"] -= block.size
        self.pending.append(block)

    def free_block(self, block: Block) -> None:
        if block not in self.pending:
            return
        self.pending.remove(block)
        block.event_count, block.holder = 0, -1
        self.counted["active"] -= block.size
        for candidate in (block.prev, block.next):
            self.try_merge_blocks(block, candidate, block.pool)
        block.pool.insert_into_blocks(block)

    @staticmethod
    def allocatable(block: Block | None) -> bool:
        return block is not None and not block.allocated and block.event_count == 0

    def try_merge_blocks(self, dst: Block, src: Block | None, pool: BlockPool) -> None:
        if src is None or not self.allocatable(src) or dst.mapped != src.mapped:
            return
        if dst.prev is src:
            dst.ptr = src.ptr
            dst.prev = src.prev
            if dst.prev is not None:
                dst.prev.next = dst
        else:
            dst.next = src.next
            if dst.next is not None:
                dst.next.prev = dst
        dst.size += src.size
        (pool.blocks if src.mapped else pool.unmapped).remove(src)

    def get_free_block(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        if self.collects():
            pool.calls += 1
        blocks, at = pool.blocks, pool.lower_bound(stream, size)
        if at == len(blocks) or blocks[at].stream != stream:
            return None

        def expandable_size(block: Block) -> int:
            grows = block.next is not None and not block.next.mapped
            return block.size + (block.next.size if grows and block.next else 0)

        if blocks[at].segment:
            following = at + 1
            while (
                blocks[at].segment
                and following < len(blocks)
                and blocks[following].stream == stream
                and expandable_size(blocks[following]) < expandable_size(blocks[at])
            ):
                at, following = following, following + 1
        found = blocks[at]
        if size < self.rules.max_split_size <= found.size:
            return None
        rounding = self.rules.max_non_split_rounding
        if size >= self.rules.max_split_size and found.size >= size + rounding:
            return None
        blocks.remove(found)
        return found

    # ------------------------------------------------------------ the device

    def alloc_block(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        alloc_size = self.get_allocation_size(size)
        if self.rules.limit != NONE and self.counted["reserved"] + alloc_size > self.rules.limit:
            return None
        if self.driver.refuses:
            self.driver.refuses = False
            return None
        if self.rules.expandable_segments:
            return self.try_allocate_expandable_block(pool, size, stream)
        if not self.driver_gives(alloc_size):
            return None
        address, rank = self.place(alloc_size)
        return Block(stream, alloc_size, address, pool, rank=rank)

    def place(self, size: int) -> tuple[int, int]:
        try:
            return self.driver.place(size)
        except Departed:
            self.depart()
            return self.driver.place(size)

    def depart(self) -> None:
        if self.counted["departed_step"] < 0:
            self.counted["departed_step"] = self.step
        self.driver.leave_recording()

    # ------------------------------------------------------------ the recording

    def hold(self, address: int, size: int, stream: int, owner: int) -> None:
        """A segment that was there before the recording."""
        if not self.driver.follows or self.rules.expandable_segments:
            self.depart()
            return
        self.take(size)
        key = (owner, size == SMALL_BUFFER)
        pool = self.pools.setdefault(key, BlockPool(key[1], owner))
        ptr, rank = self.driver.as_recorded(address)
        self.filled = Block(stream, size, ptr, pool, rank=rank)
        pool.insert_into_blocks(self.filled)

    def seed(self, address: int, size: int) -> Block | None:
        """A block that was there, in the last such segment and above all others."""
        rest = self.filled
        if rest is None or not rest.ptr <= address <= rest.ptr + rest.size - size:
            self.depart()
            return None
        rest.pool.blocks.remove(rest)
        if address > rest.ptr:
            rest.pool.insert_into_blocks(self.cut(rest, address - rest.ptr))
            rest.pool.blocks.remove(rest)
        self.filled = rest if rest.size > size else None
        return self.occupy(self.cut(rest, size) if rest.size > size else rest)

    def compare(self, block: Block, address: int) -> None:
        driver = self.driver
        if driver.follows and (driver.given or driver.refuses or block.ptr != address):
            self.depart()

    def driver_gives(self, size: int) -> bool:
        physical = round_up(size, 2 * MIB)
        if self.rules.capacity != NONE and self.physical + physical > self.rules.capacity:
            return False
        self.take(size)
        return True

    def take(self, size: int) -> None:
        self.physical += round_up(size, 2 * MIB)
        self.counted["reserved"] += size
        self.counted["device_allocs"] += 1
        self.counted["peak_reserved"] = max(self.counted["peak_reserved"], self.counted["reserved"])

    def driver_takes(self, size: int) -> None:
        self.physical -= round_up(size, 2 * MIB)
        self.counted["reserved"] -= size
        self.counted["device_frees"] += 1

    def try_allocate_expandable_block(
        self, pool: BlockPool, size: int, stream: int
    ) -> Block | None:
        candidate = self.find_expandable_block(pool, size, stream)
        if not candidate.mapped and not self.map_block(candidate, min(candidate.size, size)):
            return None
        while candidate.size < size:
            new_candidate = candidate.next
            assert new_candidate is not None
            remaining = size - candidate.size
            if not self.map_block(new_candidate, min(remaining, new_candidate.size)):
                return None
            candidate = new_candidate
        pool.blocks.remove(candidate)
        return candidate

    def page(self, pool: BlockPool) -> int:
        return SMALL_BUFFER if pool.is_small else self.rules.large_segment_size

    def find_expandable_block(self, pool: BlockPool, size: int, stream: int) -> Block:
        for block in pool.unmapped:
            if block.stream != stream:
                continue
            candidate = block
            if candidate.prev is not None and self.allocatable(candidate.prev):
                candidate = candidate.prev
            room, at = 0, candidate
            while room < size and self.allocatable(at):
                assert at is not None
                room += at.size
                at = at.next  # type: ignore[assignment]
            if room >= size:
                return candidate
        base, page = self.next_expandable, self.page(pool)
        if self.driver.given and not any(b.stream == stream for b in pool.unmapped):
            base = self.driver.given[0][0]
        self.next_expandable += ROOM
        candidate = Block(stream, ROOM // page * page, base, pool, segment=base, mapped=False)
        pool.insert_into_unmapped(candidate)
        return candidate

    def map_block(self, to_map: Block, size: int) -> bool:
        page, pool = self.page(to_map.pool), to_map.pool
        begin = (to_map.ptr - to_map.segment) // page
        end = -(-(to_map.ptr - to_map.segment + size) // page)
        mapped = (end - begin) * page
        if not self.driver_gives(mapped):
            return False
        try:
            follows = self.driver.follows
            if follows and self.driver.next_given(mapped) != to_map.segment + begin * page:
                raise Departed
        except Departed:
            self.depart()
        pool.unmapped.remove(to_map)
        to_map.mapped = True
        if mapped < to_map.size:
            remaining = self.beside(to_map, to_map.size - mapped, to_map.ptr + mapped)
            remaining.mapped = False
            self.splice(remaining, to_map, to_map.next)
            pool.insert_into_unmapped(remaining)
            to_map.size = mapped
        self.try_merge_blocks(to_map, to_map.prev, pool)
        self.try_merge_blocks(to_map, to_map.next, pool)
        pool.insert_into_blocks(to_map)
        return True

    @staticmethod
    def splice(block: Block, before: Block | None, after: Block | None) -> None:
        block.prev, block.next = before, after
        if before is not None:
            before.next = block
        if after is not None:
            after.prev = block

    def unmap_block(self, block: Block) -> None:
        page, pool = self.page(block.pool), block.pool
        begin = -(-(block.ptr - block.segment) // page)
        end = (block.ptr + block.size - block.segment) // page
        if begin >= end:
            return
        ptr, size = block.segment + begin * page, (end - begin) * page
        pool.blocks.remove(block)
        before_size = ptr - block.ptr
        if before_size > 0:
            before = self.beside(block, before_size, block.ptr)
            self.splice(before, block.prev, block)
            pool.insert_into_blocks(before)
        after_size = block.size - before_size - size
        if after_size > 0:
            after = self.beside(block, after_size, ptr + size)
            self.splice(after, block, block.next)
            pool.insert_into_blocks(after)
        block.ptr, block.size, block.mapped = ptr, size, False
        self.try_merge_blocks(block, block.prev, pool)
        self.try_merge_blocks(block, block.next, pool)
        pool.insert_into_unmapped(block)
        self.driver_takes(size)

    # ------------------------------------------------------------ giving back

    def release_block(self, block: Block) -> None:
        assert not block.segment
        block.pool.blocks.remove(block)
        self.driver_takes(block.size)

    def release_blocks(self, pool: BlockPool) -> None:
        to_unmap = []
        for block in list(pool.blocks):
            if block.segment:
                to_unmap.append(block)
            elif not block.is_split():
                self.release_block(block)
        for block in to_unmap:
            self.unmap_block(block)
            if not block.is_split():
                pool.unmapped.remove(block)

    def release_cached_blocks(self) -> None:
        for block in list(self.pending):
            self.free_block(block)
        for (owner, _), pool in self.pools.items():
            if owner == 0 or owner in self.ended:
                self.release_blocks(pool)

    def trim(self, owner: int) -> None:
        if owner == 0:
            self.release_cached_blocks()
            return
        self.ended.add(owner)
        for (of_pool, _), pool in self.pools.items():
            if of_pool == owner:
                self.release_blocks(pool)

    def release_available_cached_blocks(self, pool: BlockPool, size: int, stream: int) -> bool:
        largest_to_split = self.rules.max_split_size
        if largest_to_split == NONE:
            return False
        wanted = max(size, largest_to_split)
        at = pool.lower_bound(stream, wanted)
        blocks = pool.blocks
        if at < len(blocks) and blocks[at].stream == stream and not blocks[at].segment:
            self.release_block(blocks[at])
            return True
        released = 0
        for block in reversed(blocks[:at]):
            if released >= wanted or block.size < largest_to_split or block.stream != stream:
                break
            if not block.segment:
                released += block.size
                self.release_block(block)
        return released >= wanted

    def garbage_collect_cached_blocks(self) -> None:
        threshold = int(self.rules.gc_threshold * self.rules.limit)
        pool = self.pools.get((0, False))
        if self.counted["reserved"] <= threshold or pool is None:
            return
        target, reclaimed = self.counted["reserved"] - threshold, 0
        whole = [block for block in pool.blocks if not block.is_split()]
        total_age, count = sum(block.gc_count() for block in whole), len(whole)
        freed = True
        while reclaimed < target and freed and count > 0:
            age_threshold = total_age / count
            freed = False
            for block in list(pool.blocks):
                old = block.gc_count() >= age_threshold
                if not block.is_split() and not block.segment and old:
                    freed = True
                    reclaimed += block.size
                    total_age -= block.gc_count()
                    count -= 1
                    self.release_block(block)


Step = tuple[int, int, int, int]  # kind, block, bytes, lane


def replay(
    steps: Sequence[Step],
    lanes: list[tuple[int, int]],
    rules: Rules,
    addresses: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
) -> dict[str, object]:
    """What `core.replay` says, without what only C++ has.

    Args:
        steps, lanes, rules: as for `core.replay`.
        addresses: those of the recording, one per step.
        ranks: of the segments, in the order in which they are made; the lower one serves first.
    """
    driver = Driver(rules.order, ranks)
    driver.follows = addresses is not None
    allocator = Allocator(rules, driver)
    held: dict[int, Block] = {}
    curves: dict[str, list[int]] = {"reserved": [], "active": [], "largest_free": []}
    failed, wanted = -1, 0
    for i, (kind, number, size, lane) in enumerate(steps):
        allocator.step = i
        if kind not in (HELD, SEED):
            allocator.filled = None
        block = held.get(number)
        if block is not None and block.holder != number:
            block = held.pop(number, None) and None  # a retry completed it; it may be another's now
        try:
            if kind in (ALLOC, ATTEMPT) and block is None:
                if kind == ATTEMPT and addresses is not None:
                    allocator.depart()
                got = allocator.malloc(size, *lanes[lane])
                if kind == ALLOC:
                    held[number], got.holder = got, number
                    if addresses is not None:
                        allocator.compare(got, addresses[i])
                else:
                    allocator.free(got)
                    allocator.free_block(got)
            elif kind == FREE_REQUESTED and block is not None and block.allocated:
                allocator.free(block)
            elif kind == FREE_COMPLETED and block is not None:
                if block.allocated:
                    allocator.free(block)
                allocator.free_block(block)
                del held[number]
            elif kind == TRIM:
                allocator.trim(lanes[lane][1])
            elif kind == HELD and addresses is not None:
                allocator.hold(addresses[i], size, *lanes[lane])
            elif kind == SEED and addresses is not None and block is None:
                seeded = allocator.seed(addresses[i], size)
                if seeded is not None:
                    held[number], seeded.holder = seeded, number
            elif kind == GIVEN and addresses is not None:
                driver.given.append((addresses[i], size))
            elif kind == REFUSED and addresses is not None:
                driver.refuses = driver.follows
        except OutOfMemory as error:
            failed, wanted = i, error.args[0]
        curves["reserved"].append(allocator.counted["reserved"])
        curves["active"].append(allocator.counted["active"])
        curves["largest_free"].append(
            max((b.size for pool in allocator.pools.values() for b in pool.blocks), default=0)
        )
        if failed >= 0:
            break
    after = {f"{name}_after": values for name, values in curves.items()}
    return {**allocator.counted, "failed_step": failed, "failed_bytes": wanted, **after}


def in_all_orders(
    steps: Sequence[Step], lanes: list[tuple[int, int]], rules: Rules, segments: int
) -> list[dict[str, object]]:
    """The outcome of each order of so many segments.

    Raises:
        IndexError: there are more segments.
    """
    return [replay(steps, lanes, rules, ranks=order) for order in permutations(range(segments))]
