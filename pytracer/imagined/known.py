"""Keeps the known values of small fake tensors: positions, masks of ones, rates by layer, step numbers.

Models decide by such values. They are computed on the CPU beside the fake tensors, as long as all
inputs are known. Random values are never known, but random whole numbers are guessed: a program
that takes `data[i : i + length]` for a random `i` gets a batch of the right length. A guess is passed
on like a known value, and stays a guess.

A fake storage with known values has a mirror: real memory of the same size. Its views share the
mirror, and writes in place go there.
"""

import contextlib
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from pytracer.basics.private_torch import tree_iter, tree_map, without_modes
from pytracer.data._native import C

MOST = 1 << 16  # elements
GUESS = 1  # safe to divide by, to take a root or a logarithm of

aten = torch.ops.aten
_RANDOM = torch.Tag.nondeterministic_seeded
_ORDERS = frozenset((aten.randperm.default, aten.randperm.generator))
# Each with the positions of its bounds: None where the lower one is 0.
_WHOLE_NUMBERS: dict[Any, tuple[int | None, int]] = {
    aten.randint.default: (None, 0),
    aten.randint.generator: (None, 0),
    aten.randint.low: (0, 1),
    aten.randint.low_generator: (0, 1),
}
_NO_VALUES = frozenset(
    (
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        torch.ops.prim.device.default,
    )
)


# Writes that do not read what was there.
_OVERWRITES = frozenset(
    (
        aten.copy_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.zero_.default,
        aten.scatter_.src,
        aten.scatter_.value,
        aten.index_copy_.default,
        aten.index_put_.default,
    )
)
_COPIES = frozenset(
    (
        aten._to_copy.default,
        aten.clone.default,
        aten.cat.default,
        aten.stack.default,
        aten.repeat.default,
    )
)
_EXTREMES = frozenset(
    (aten.max.default, aten.min.default, aten.amax.default, aten.amin.default)
)  # which one of the numbers has
_GUESSED, _ASSUMED, _SHARED = "guessed", "assumed", "shared"
# Of any number: none is infinite, or none at all.
_NEVER = frozenset(
    (aten.isnan.default, aten.isinf.default, aten.isposinf.default, aten.isneginf.default)
)
_ITSELF = {aten.eq.Tensor: True, aten.ne.Tensor: False}
# What is true of any number beside an infinite one, by whether that is positive.
_INFINITE: dict[Any, Callable[[bool], bool]] = {
    aten.eq.Scalar: lambda above: False,
    aten.ne.Scalar: lambda above: True,
    **dict.fromkeys((aten.lt.Scalar, aten.le.Scalar), lambda above: above),
    **dict.fromkeys((aten.gt.Scalar, aten.ge.Scalar), lambda above: not above),
}
# What follows where all elements are the same truth.
_OF_ONE: dict[Any, Callable[[bool], bool]] = {
    **dict.fromkeys((aten.all.default, aten.all.dim, aten.any.default, aten.any.dim), bool),
    **dict.fromkeys((aten.logical_not.default, aten.bitwise_not.default), lambda one: not one),
}
_OF_TWO: dict[Any, Callable[[bool, bool], bool]] = {
    **dict.fromkeys((aten.mul.Tensor, aten.logical_and.default), lambda one, other: one and other),
    aten.bitwise_and.Tensor: lambda one, other: one and other,
    **dict.fromkeys(
        (aten.logical_or.default, aten.bitwise_or.Tensor), lambda one, other: one or other
    ),
}
# What each says of a random number and another one.
_UNEQUAL = {
    **dict.fromkeys((aten.eq.Scalar, aten.eq.Tensor), False),
    **dict.fromkeys((aten.ne.Scalar, aten.ne.Tensor), True),
}
_SUMS = frozenset((aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default))
_UNIFORM = frozenset((aten.rand.default, aten.rand.generator, aten.rand_like.default))
# What each says of every number in [0, 1), by the other side.
_COMPARES: dict[Any, Callable[[float], bool | None]] = {
    aten.lt.Scalar: lambda other: False if other <= 0 else True if other >= 1 else None,
    aten.le.Scalar: lambda other: False if other < 0 else True if other >= 1 else None,
    aten.gt.Scalar: lambda other: True if other < 0 else False if other >= 1 else None,
    aten.ge.Scalar: lambda other: True if other <= 0 else False if other >= 1 else None,
}
_COMPARISONS: dict[Any, Callable[[float, float], bool]] = {
    aten.lt.Scalar: operator.lt,
    aten.le.Scalar: operator.le,
    aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge,
}
_ON_THE_HOST = frozenset(
    (
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.zeros.default,
    )
)


class Known:
    """The known values of fake tensors."""

    def __init__(self, is_fake: Callable[[Any], bool]) -> None:
        """Knows no values yet."""
        self._is_fake = is_fake
        self._mirrors = WeakIdKeyDictionary()
        self._guesses = WeakIdKeyDictionary()  # the storages of guessed values
        # The smallest and the largest number that may have been drawn.
        self._bounds = WeakIdKeyDictionary()
        self._pinned = WeakIdKeyDictionary()
        self._uniform = WeakIdKeyDictionary()  # the storages of random numbers from [0, 1)
        self._undefined = WeakIdKeyDictionary()  # the storages that nobody has written to
        self._everywhere = WeakIdKeyDictionary()  # the storages of one truth, of any size
        self._grounds = False
        self.assumes: Callable[[], None] = lambda: (
            None
        )  # called where a size relies on an assumption

    def is_guess(self, tensor: Any) -> bool:
        """Whether the values come from a guess, so that nothing may be decided by them."""
        return self._guesses.get(tensor.untyped_storage()) is _GUESSED

    def is_assumed(self, tensor: Any) -> bool:
        """Whether they follow from an assumption: no random word is special, ranks have equal values."""
        return self._guesses.get(tensor.untyped_storage()) in (_ASSUMED, _SHARED)

    def is_shared(self, tensor: Any) -> bool:
        """Whether they follow from the values of all ranks, of which one runs."""
        return self._guesses.get(tensor.untyped_storage()) is _SHARED

    def value_of(self, tensor: Any) -> torch.Tensor | None:
        """The tensor's values on the CPU, or None if they are unknown."""
        if tensor.numel() > MOST:
            return None
        mirror = self._mirrors.get(tensor.untyped_storage())
        if mirror is None:
            return None
        with without_modes(), torch.no_grad():
            return _look_into(mirror, tensor)

    def result_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator returns on the CPU, or None if an input is unknown or a guess."""
        given = [one for one in tree_iter((args, kwargs)) if self._is_fake(one)]
        if any(self.value_of(one) is None or self.is_guess(one) for one in given):
            return None
        plain = tree_map(self._plain, (args, kwargs))
        with without_modes(), torch.no_grad():
            return func(*plain[0], **plain[1])

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Repeats an operator that ran on fake tensors on their known values."""
        fresh = [one for one in tree_iter(result) if self._is_fake(one)]
        if func._schema.is_mutable:
            self._is_written(func, args, kwargs)
        if func in _ON_THE_HOST and self._must_have_memory(fresh[0], kwargs):
            self._ground(fresh[0])
            return
        if func in _UNIFORM:
            self._uniform[fresh[0].untyped_storage()] = True
        if (same := self._same_everywhere(func, args)) is not None:
            self._everywhere[fresh[0].untyped_storage()] = same
            self._all(fresh[0], same)
            return
        if func in _UNEQUAL and self._asks_for_a_special_word(args):
            self._all(fresh[0], _UNEQUAL[func])
            self._guesses[fresh[0].untyped_storage()] = _ASSUMED
            return
        if func in _COMPARES and (answer := self._compared(func, args)) is not None:
            self._all(fresh[0], answer)
            return
        if func in _ORDERS:  # any order of a data set's rows will do
            with without_modes():
                self._mirror(fresh[0], torch.arange(args[0], device="cpu"))
            return
        if func in _WHOLE_NUMBERS and fresh[0].numel() <= MOST:
            self._guess(fresh[0], func, args)
            return
        given = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
        if not self._can_run(func, given, fresh) or not self._run(func, args, kwargs, fresh):
            self._forget(func, args, kwargs)

    @contextlib.contextmanager
    def grounding(self) -> Iterator[None]:
        """Gives memory to new tensors on the host inside the block, and knows the values written there."""
        self._grounds = True
        try:
            yield
        finally:
            self._grounds = False

    def is_pinned(self, tensor: Any) -> bool:
        """Whether the tensor was made in pinned memory, and has memory here."""
        return tensor.untyped_storage() in self._pinned

    def _must_have_memory(self, tensor: Any, kwargs: Any) -> bool:
        if tensor.device.type != "cpu" or tensor.numel() > MOST:
            return False
        return self._grounds or bool(kwargs.get("pin_memory"))

    def _ground(self, tensor: Any) -> None:
        memory = _zeros(tensor.untyped_storage().nbytes())
        C.ground(tensor, memory)
        self._mirrors[tensor.untyped_storage()] = memory
        if not self._grounds:
            self._pinned[tensor.untyped_storage()] = True

    def repeat(self, outputs: list[Any], given: list[Any]) -> None:
        """Makes each output as many copies of the one given tensor as it has room for."""
        value = self.value_of(given[0]) if len(given) == 1 else None
        for one in outputs:
            if value is None or one.numel() > MOST or self.is_guess(given[0]):
                self.forget([one])
            else:
                with without_modes(), torch.no_grad():
                    copies = value.reshape(-1).repeat(one.numel() // max(value.numel(), 1))
                    self._mirror(one, copies.reshape(one.shape))
                self._guesses[one.untyped_storage()] = _SHARED

    def change(self, tensors: list[Any], how: Callable[[Any], Any]) -> None:
        """Changes values in place, as other ranks do that have the same."""
        for one in tensors:
            value = self.value_of(one)
            if value is None or self.is_guess(one):
                self.forget([one])
                continue
            with without_modes(), torch.no_grad():
                value.copy_(how(value))
            self._guesses[one.untyped_storage()] = _SHARED

    def ground(self, tensor: Any, values: torch.Tensor) -> None:
        """Gives memory with these values to a new tensor on the host."""
        with self.grounding():
            self._ground(tensor)
        with without_modes(), torch.no_grad():
            _look_into(self._mirrors[tensor.untyped_storage()], tensor).copy_(values)

    def learn(self, tensor: Any, values: torch.Tensor) -> None:
        """Keeps the values of a new tensor."""
        with without_modes(), torch.no_grad():
            self._mirror(tensor, values)

    def forget(self, tensors: list[Any]) -> None:
        """Drops the values of tensors that were overwritten with unknown ones."""
        for one in tensors:
            if self._is_fake(one):
                self._mirrors.pop(one.untyped_storage(), None)

    def _is_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forgets what writes in place end: that elements are alike, and that they are undefined."""
        for one in filter(self._is_fake, tree_iter((args, kwargs))):
            storage = one.untyped_storage()
            self._everywhere.pop(storage, None)
            if one is args[0]:
                self._bounds.pop(storage, None)
            was_undefined = self._undefined.pop(storage, False)
            overwritten = was_undefined and func in _OVERWRITES and one is args[0]
            if overwritten and one.numel() <= MOST:  # whatever it was before, nobody reads it
                self._mirrors[storage] = _zeros(storage.nbytes())

    def _can_run(self, func: Any, given: list[Any], fresh: list[Any]) -> bool:
        returns_nothing = not fresh and func._schema.is_mutable and not func._schema.returns
        if func in _NO_VALUES:
            self._undefined.update((one.untyped_storage(), True) for one in fresh)
            return False
        if _RANDOM in func.tags or not (fresh or returns_nothing):
            return False
        if any(one.numel() > MOST for one in (*given, *fresh)):
            return False
        return all(
            not self._is_fake(one) or one.untyped_storage() in self._mirrors for one in given
        )

    def _run(self, func: Any, args: Any, kwargs: Any, fresh: list[Any]) -> bool:
        given = tree_map(self._plain, (args, kwargs))
        with without_modes(), torch.no_grad():
            try:
                results = func(*given[0], **given[1])
            except Exception:  # the CPU has no such kernel
                return False
            values = [one for one in tree_iter(results) if isinstance(one, torch.Tensor)]
            if len(values) != len(fresh):
                return False
            for tensor, value in zip(fresh, values, strict=True):
                if tensor.untyped_storage() not in self._mirrors:
                    self._mirror(tensor, value)
        self._pass_on_guesses(func, args, kwargs, fresh)
        return True

    def _asks_for_a_special_word(self, args: Any) -> bool:
        """Whether guesses are compared: with a number that is known, such as padding's, or others."""
        if not self.is_guess(args[0]):
            return False
        other = args[1]
        return not self._is_fake(other) or other.untyped_storage() in self._mirrors

    def _same_everywhere(self, func: Any, args: Any) -> bool | None:
        """The truth that all elements of the result have, because no number is NaN or infinite."""
        fakes = [one for one in args[:2] if self._is_fake(one)]
        if all(one.untyped_storage() in self._mirrors for one in fakes):
            return None  # so its real values say it
        if func in _NEVER:
            return False
        if func in _INFINITE and isinstance(args[1], float) and math.isinf(args[1]):
            return _INFINITE[func](args[1] > 0)
        if func in _ITSELF and args[0] is args[1]:
            return _ITSELF[func]
        given = [self._everywhere.get(one.untyped_storage()) for one in fakes]
        if func in _OF_ONE and given[0] is not None:
            return _OF_ONE[func](given[0])
        if func in _OF_TWO and len(given) == 2 and None not in given:
            return _OF_TWO[func](*given)
        return False if func in _SUMS and given[0] is False else None

    def _all(self, tensor: Any, answer: bool) -> None:
        if tensor.numel() <= MOST:
            with without_modes():
                self._mirror(tensor, torch.full(tensor.shape, answer, device="cpu"))

    def _compared(self, func: Any, args: Any) -> bool | None:
        """What a comparison of random numbers says of all of them; None if it depends."""
        bounds = self._bounds.get(args[0].untyped_storage())
        answer = None if bounds is None else _of_all(func, bounds, args[1])
        if answer is not None:
            return answer
        if args[0].untyped_storage() not in self._uniform:
            return None
        return _COMPARES[func](args[1])

    def _guess(self, tensor: Any, func: Any, args: Any) -> None:
        """The smallest number that may be drawn, but a positive one if there is one."""
        lower, upper = _WHOLE_NUMBERS[func]
        least = 0 if lower is None else args[lower]
        number = min(max(least, GUESS), max(args[upper] - 1, least))
        with without_modes():
            self._mirror(tensor, torch.full(tensor.shape, number, dtype=tensor.dtype, device="cpu"))
        self._guesses[tensor.untyped_storage()] = _GUESSED
        self._bounds[tensor.untyped_storage()] = (least, max(args[upper] - 1, least))

    def _pass_on_guesses(self, func: Any, args: Any, kwargs: Any, fresh: list[Any]) -> None:
        given = [one for one in tree_iter((args, kwargs)) if self._is_fake(one)]
        kinds = {self._guesses.get(one.untyped_storage()) for one in given}
        if kinds <= {None}:
            return
        kind = next(one for one in (_GUESSED, _SHARED, _ASSUMED) if one in kinds)
        written = given if func._schema.is_mutable else []
        for one in (*fresh, *written):
            self._guesses[one.untyped_storage()] = kind
        if func in _COPIES or func in _EXTREMES:
            each = [self._bounds.get(one.untyped_storage()) for one in given]
            if None not in each:
                least, most = zip(*each, strict=True)
                self._bounds[fresh[0].untyped_storage()] = (min(least), max(most))

    def _mirror(self, tensor: Any, value: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        mirror = torch.UntypedStorage(storage.nbytes(), device="cpu")
        _look_into(mirror, tensor).copy_(value)
        self._mirrors[storage] = mirror

    def _plain(self, one: Any) -> Any:
        if self._is_fake(one):
            return self.value_of(one)
        return torch.device("cpu") if isinstance(one, torch.device) else one

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Drops the values of tensors that the operator has overwritten with unknown ones."""
        if not func._schema.is_mutable:
            return
        for number, one in enumerate(func._schema.arguments):
            if one.alias_info is not None and one.alias_info.is_write:
                given = args[number] if number < len(args) else kwargs.get(one.name)
                self.forget([each for each in tree_iter(given) if isinstance(each, torch.Tensor)])


def _of_all(func: Any, bounds: tuple[int, int], other: float) -> bool | None:
    """What a comparison with another number says of all whole numbers between two bounds."""
    ends = {_COMPARISONS[func](end, other) for end in bounds}
    return ends.pop() if len(ends) == 1 else None


def _zeros(size: int) -> torch.UntypedStorage:
    with without_modes():
        return torch.zeros(size, dtype=torch.uint8, device="cpu").untyped_storage()


def _look_into(mirror: torch.UntypedStorage, tensor: Any) -> torch.Tensor:
    view = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return view.set_(mirror, tensor.storage_offset(), tensor.shape, tensor.stride())
