"""Random event streams: valid ones, as allocators make them, and hostile ones."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from pytracer.data.schema import ACTION, Events, Places

# Place 0 is the CPU; 1 and 2 are two streams of cuda:0; 3 is cuda:1.
PLACES = Places(
    stream=np.array([0, 0, 7, 0], dtype=np.uint64),
    pool_high=np.zeros(4, dtype=np.uint64),
    pool_low=np.zeros(4, dtype=np.uint64),
    device_type=np.array([0, 1, 1, 1], dtype=np.uint8),
    device_index=np.array([0, 0, 0, 1], dtype=np.uint8),
)
CPU, CUDA, CUDA_STREAM_7, OTHER_CUDA = range(4)
DEVICES = {CPU: (0, 0), CUDA: (1, 0), CUDA_STREAM_7: (1, 0), OTHER_CUDA: (1, 1)}

Row = tuple[int, int, int, int]  # action, address, bytes, place


def make_events(rows: list[Row]) -> Events:
    """The event table of these rows; what lifetimes do not look at is 0, ticks rise."""
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    zeros = np.zeros(len(rows))
    return Events(
        ticks=np.arange(len(rows), dtype=np.uint64),
        address=np.array(columns[1], dtype=np.uint64),
        bytes=np.array(columns[2], dtype=np.uint64),
        action=np.array(columns[0], dtype=np.uint8),
        scope=zeros.astype(np.uint32),
        place=np.array(columns[3], dtype=np.uint16),
        thread=zeros.astype(np.uint16),
    )


@st.composite
def hostile_events(draw: st.DrawFn, max_rows: int = 60) -> Events:
    """Anything at all, at few addresses so that it collides; unknown actions and places too."""
    row = st.tuples(
        st.one_of(st.integers(0, len(ACTION) - 1), st.sampled_from([len(ACTION), 255])),
        st.one_of(
            st.integers(0, 8), st.sampled_from([64, 65, 100, 128, 2**63, 2**64 - 2, 2**64 - 1])
        ),
        st.one_of(st.integers(0, 40), st.just(2**48 - 1)),
        st.one_of(st.integers(0, len(PLACES.stream) - 1), st.sampled_from([4, 65535])),
    )
    return make_events(draw(st.lists(row, max_size=max_rows)))


@dataclass
class _Block:
    address: int
    bytes: int
    place: int
    requested: bool = False  # its free was requested


@dataclass
class _Allocator:
    """One device's allocator: hands out memory that nobody holds, the lowest first."""

    cuda: bool
    blocks: list[_Block] = field(default_factory=list)

    def room_for(self, size: int) -> int:
        address = 512
        for block in sorted(self.blocks, key=lambda block: block.address):
            if address + size <= block.address:
                break
            address = block.address + max(block.bytes, 1)
        return address


@st.composite
def valid_events(draw: st.DrawFn, max_steps: int = 60) -> Events:
    """What two devices' allocators could record: nothing in it is lost or unmatched.

    Both hold blocks at the start. The CPU's seeds come first; cuda's come after its snapshot,
    with other events in between, and rows of cuda before the snapshot are there to be ignored.
    A trace may begin inside of this one: with another snapshot, and seeds of what is alive.
    """
    rows: list[Row] = []
    allocators = {CPU: _Allocator(cuda=False), CUDA: _Allocator(cuda=True)}

    def record(action: str, block: _Block) -> None:
        rows.append((ACTION[action], block.address, block.bytes, block.place))

    def alloc(place: int, quiet: bool = False) -> None:
        allocator = allocators[place]
        size = draw(st.integers(1, 5000))
        stream = draw(st.sampled_from([CUDA, CUDA_STREAM_7])) if allocator.cuda else place
        block = _Block(allocator.room_for(size), size, stream)
        allocator.blocks.append(block)
        if not quiet:
            record("alloc", block)

    def step(place: int) -> None:
        allocator = allocators[place]
        what = draw(st.sampled_from(["alloc", "free", "mention", "inside", "segment"]))
        if what == "segment":
            record("segment_alloc", _Block(2**40, 2**21, place))
        elif what == "alloc" or not allocator.blocks:
            alloc(place)
        else:
            block = draw(st.sampled_from(allocator.blocks))
            if what == "free":
                free(allocator, block)
            else:
                inside = draw(st.integers(0, block.bytes - 1)) if what == "inside" else 0
                action = draw(st.sampled_from(["label", "saved"]))
                record(action, _Block(block.address + inside, 1, block.place))

    def free(allocator: _Allocator, block: _Block) -> None:
        if allocator.cuda and not block.requested:
            record("free_requested", block)
            block.requested = True
            if draw(st.booleans()):  # other streams use it still
                return
        record("free_completed", block)
        allocator.blocks.remove(block)

    for place in allocators:
        for _ in range(draw(st.integers(0, 4))):
            alloc(place, quiet=True)
    for block in allocators[CPU].blocks:
        record("seed", block)
    for _ in range(draw(st.integers(0, 5))):
        step(CUDA)  # before the snapshot
    rows.append((ACTION["snapshot"], 0, 0, CUDA))
    seeds = [_Block(block.address, block.bytes, block.place) for block in allocators[CUDA].blocks]
    for _ in range(draw(st.integers(0, max_steps))):
        if draw(st.booleans()) and seeds:
            record("seed", seeds.pop(0))
        step(draw(st.sampled_from([CPU, CUDA])))
    for block in seeds:
        record("seed", block)
    if draw(st.booleans()):
        rows.append((ACTION["snapshot"], 0, 0, CUDA))
        for block in allocators[CUDA].blocks:
            record("seed", block)
        for _ in range(draw(st.integers(0, 5))):
            step(CUDA)
    return make_events(rows)
