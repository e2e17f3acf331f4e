"""Tensors that the card needs, or NCCL's process group keeps, after the program has let them go.

By the rules of torch's ProcessGroupNCCL.cpp and of its allocator:

- A collective that is not waited for at once keeps its tensors until `work.wait()`. If nobody calls
  it, as DistributedDataParallel does not, a thread must first see that the collective has ended. It
  looks ten times a second. Then the next collective lets go.
- A sent or received tensor is in use until the card is done with it. Until the program next waits for
  the card, nobody knows when that is.
- The same holds for a block that another stream uses, by `record_stream` or in a backward pass. It
  is in use from when the program lets go of it until that stream has come so far.

So the end of such a block is an interval. At the earliest it is what the run does; at the latest it
is what `hold` keeps.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pytracer.data._native import C

Hold = Any  # keeps a block at the latest, as long as it lives


def _nothing() -> None:
    pass


_STEPS = 2  # within which the thread has looked for certain


@dataclass
class _Stash:
    first: Any  # a weak reference to the collective's first output
    tensors: list[Any]  # for the earliest end
    at_most: list[Hold]  # for the latest
    steps: int = 0


class Shelf:
    """What the card and the process group keep."""

    def __init__(self) -> None:
        """Keeps nothing yet."""
        self.hold: Callable[..., Hold] | None = None  # a tensor's block, but not this stream's
        self.on_wait: Callable[[], None] = _nothing
        self._stashes: list[_Stash] = []
        self._sent: list[Hold] = []
        self._used: dict[int, tuple[int, Hold]] = {}  # the stream that uses a block, and the block
        self._numbers = itertools.count()
        self._has_kept = False
        self._waits = False

    @property
    def has_kept(self) -> bool:
        """Whether any block may end later than the run says."""
        self._hear_of_passes()
        return self._has_kept

    def begins(self) -> None:
        """A collective begins: those that are done let go."""
        for stash in self._stashes:
            stash.tensors.clear()

    def stash(self, tensors: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Keeps the tensors of a collective that runs beside the program."""
        if self.hold is None or self._waits or not outputs:
            return
        first, at_most = weakref.ref(outputs[0]), [self.hold(one) for one in tensors]
        self._stashes.append(_Stash(first, list(tensors), at_most))
        self._has_kept = True

    def waited(self, outputs: Sequence[Any]) -> None:
        """The program waited for the collective with these outputs."""
        for at, stash in reversed(list(enumerate(self._stashes))):
            if outputs and stash.first() is outputs[0]:
                del self._stashes[at]
                return

    def sent(self, tensors: Sequence[Any]) -> None:
        """Keeps what is sent or received."""
        if self.hold is not None:
            self._sent += [self.hold(one) for one in tensors]
            self._has_kept = True

    def used_on(self, stream: int, tensor: Any) -> None:
        """Keeps a tensor that was made on another stream than this one, which uses it."""
        if self.hold is not None and (held := self.hold(tensor, but_of=stream)):
            self._keep_used((stream, held))

    def let_go(self, stream: int | None = None) -> list[int]:
        """The numbers of what the program has let go of, and this stream uses. None: any stream."""
        self._hear_of_passes()
        used = self._used.items()
        return [number for number, (on, held) in used if held.let_go and stream in (None, on)]

    def _hear_of_passes(self) -> None:
        """Keeps what backward passes handed to other streams."""
        for use in C.take_uses_of_passes():
            self._keep_used(use)

    def _keep_used(self, use: tuple[int, Hold]) -> None:
        self._used[next(self._numbers)] = use
        self._has_kept = True

    def reached(self, numbers: list[int]) -> None:
        """The card needs these no more."""
        for number in numbers:
            self._used.pop(number, None)

    def synchronized(self) -> None:
        """The program waited for the card."""
        self.on_wait()
        self._sent.clear()
        self.reached(self.let_go())

    def stepped(self) -> None:
        """An optimizer stepped."""
        for stash in self._stashes:
            stash.steps += 1
        self._stashes = [stash for stash in self._stashes if stash.steps < _STEPS]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """In the block torch's C++ waits for its collectives itself."""
        self._waits, before = True, self._waits
        try:
            yield
        finally:
            self._waits = before
