"""What each case must show, computed without pytracer's analysis.

Weights, gradients, optimizer state and inputs: numel times itemsize, by the formula of each.
Activations: a slow reference that listens, in Python, to what autograd keeps.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from programs.conformance.models import Batch
from programs.conformance.optimizers import OPTIMIZERS, nbytes
from programs.conformance.techniques import Training, Watch
from pytracer.analysis.facts import usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.data._native import C
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY

# Autocast casts the arguments of these to 16 bits; of other modules it leaves weights alone.
CAST_MODULES = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)


def storages(tensors: Any) -> int:
    """Bytes of distinct storages: tied weights count once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def analytic(training: Training, optimizer: str, *, casts: bool = True) -> dict[str, int]:
    """The most bytes that each category ever has."""
    model, device = training.model, training.kind
    average = training.average
    more = [*average.parameters(), *average.buffers()] if average is not None else []
    tensors = [*model.parameters(), *model.buffers(), *more, *training.masters]
    weights = storages([tensor for tensor in tensors if tensor.device.type == device])
    trained = [p for p in model.parameters() if p.requires_grad]
    kind = OPTIMIZERS[optimizer]
    in_16_bits = copies if training.optimizer is not None else copies_in_passing
    state = sum(kind.state(p, device) for p in training.trained()) + kind.once
    return {
        "weights": weights + (in_16_bits(model) if training.cast and casts else 0),
        "gradients": gradients(trained, training.masters),
        "optimizer_state": state,
    }


def gradients(trained: list[nn.Parameter], masters: list[nn.Parameter]) -> int:
    """One for each parameter; to masters they are handed over one after the other."""
    own = [nbytes(p) for p in trained]
    theirs = [nbytes(p) for p in masters]
    if not masters:
        return sum(own)
    return max(sum(theirs[: i + 1]) + sum(own[i:]) for i in range(len(own)))


def copies(model: nn.Module) -> int:
    """Autocast keeps a 16-bit copy of each trained weight that it casts, until it is left."""
    cast = {
        p: 2 * p.numel()
        for module in model.modules()
        if isinstance(module, CAST_MODULES)
        for p in module.parameters(recurse=False)
        if p.requires_grad
    }
    return sum(cast.values())


def in_bfloat16(weight: Tensor) -> np.ndarray[Any, Any]:
    """Its bits, rounded to the nearest, ties to even, without asking torch for memory."""
    bits = weight.detach().cpu().numpy().view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16).view(np.int16)


def bits_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Of what is in 16 bits already."""
    return tensor.detach().cpu().view(torch.int16).numpy()


def copies_in_passing(model: nn.Module) -> int:
    """Without grad mode they last as long as the op: the most is one module's."""
    return max(
        2 * sum(p.numel() for p in module.parameters(recurse=False))
        for module in model.modules()
        if isinstance(module, CAST_MODULES)
    )


def inputs_of(technique: str, training: Training) -> dict[str, int]:
    """What is made outside and handed to the model or its loss, the most there is at once."""
    batch = training.batch()
    first = batch.inputs[0]
    amount = storages(batch.tensors())
    amount += storages(cast_from(training, batch))
    if "accumulation" in technique:
        amount *= 3  # a batch for each backward
    if technique in ("inference", "autocast_inference"):
        amount = storages(batch.inputs)  # nothing uses the target
    elif technique == "distillation":  # the teacher's outputs, and nothing uses the target
        with torch.no_grad():
            amount = storages([*batch.inputs, training.model(*batch.inputs)])
    elif technique == "generation":
        # What the prompt is a part of, a word, the next one.
        amount = nbytes(first) + 2 * nbytes(first[:, :1])
    elif technique == "beam_search":
        beams = 3
        amount = beams * (nbytes(first[:1, : first.shape[1] // 2]) + nbytes(first[:1, :1]))
        amount += nbytes(first)  # of which the beams' copies were made
    return {"inputs": amount}


def cast_from(training: Training, batch: Batch) -> list[Tensor]:
    """What the batch was made from: the raw inputs, where the model wants another dtype."""
    raw = training.recipe.batch(training.device).inputs
    return [x for x, given in zip(raw, batch.inputs, strict=True) if x.dtype != given.dtype]


# -------------------------------------------------------------------------- activations


@dataclass
class Span:
    """A stretch of the event log: after `begin` events, up to `end` of them."""

    begin: int
    end: int


def position() -> int:
    """How many events have been recorded."""
    return int(C.status()["events"])


@dataclass
class Reference(Watch):
    """Listens to what every saved-tensor hook keeps, its own or the program's, while it is open."""

    # Positions and addresses: of what was kept, and of what the program had made for the step.
    saved: list[tuple[int, int]] = field(default_factory=list)
    made: list[tuple[int, int]] = field(default_factory=list)
    forwards: list[Span] = field(default_factory=list)
    backwards: list[Span] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # of weights, by their values
    weights: list[nn.Parameter] = field(default_factory=list)  # whose copies to look for
    bits: list[np.ndarray[Any, Any]] = field(default_factory=list)
    recomputations: list[Span] = field(default_factory=list)
    depth: int = 0  # of backward passes

    @contextmanager
    def forward(self) -> Iterator[None]:
        self.bits = [in_bfloat16(p) for p in self.weights]
        self.forwards.append(Span(position(), -1))
        yield
        self.forwards[-1].end = position()

    def given(self, tensors: Iterable[Tensor]) -> None:
        self.made += [(position(), t.untyped_storage().data_ptr()) for t in tensors]

    @contextmanager
    def listening(self, layers: list[nn.Module]) -> Iterator["Reference"]:
        """To be entered inside of the trace."""
        autograd: Any = torch._C._autograd
        push = autograd._push_saved_tensors_default_hooks

        def heard(pack: Any, unpack: Any) -> Any:
            return push(lambda tensor: self._keeps(pack(tensor)), unpack)

        with ExitStack() as stack:
            patch = mock.patch.object
            stack.enter_context(patch(autograd, "_push_saved_tensors_default_hooks", heard))
            engine = self._around(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
            stack.enter_context(patch(torch.autograd, "_engine_run_backward", engine))
            for layer in layers:
                handle = layer.register_forward_pre_hook(self._enters)
                stack.callback(handle.remove)
                handle = layer.register_forward_hook(self._leaves, always_call=True)
                stack.callback(handle.remove)
            # Detached: to return what was given would make a cycle of an op's output and its node.
            keep = torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x)
            stack.enter_context(keep)
            yield self

    def _keeps(self, packed: Any) -> Any:
        for part in pytree.tree_leaves(packed):
            if isinstance(part, Tensor):
                where = (position(), part.untyped_storage().data_ptr())
                self.saved.append(where)
                if self._is_copy(part):
                    self.copies.append(where)
        return packed

    def _is_copy(self, tensor: Tensor) -> bool:
        if tensor.dtype != torch.bfloat16 or tensor.dim() != 2 or not self.bits:
            return False
        first = bits_of(
            tensor.detach()[:1]
        )  # on the CPU, and a row before the whole: there are many weights
        return any(
            weight.shape == tuple(tensor.shape)
            and np.array_equal(weight[:1], first)
            and np.array_equal(weight, bits_of(tensor))
            for bits in self.bits
            for weight in (bits, bits.T)
        )

    def _around(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            outermost = self.depth == 0
            self.depth += 1
            if outermost:
                self.backwards.append(Span(position(), -1))
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                if outermost:
                    self.backwards[-1].end = position()

        return call

    def _enters(self, *_: Any) -> None:
        if self.depth:
            self.recomputations.append(Span(position(), -1))

    def _leaves(self, *_: Any) -> None:
        if self.depth:
            self.recomputations[-1].end = position()

    # ---------------------------------------------------------------- afterwards

    def activations(self, trace: Trace) -> np.ndarray[Any, Any]:
        """Which allocations of the trace are activations, as this reference saw it.

        Those that a hook kept, that a forward made and its backward found alive, or that a
        recomputation left behind; but not the batch, and what has been shown to be a weight, a
        gradient, optimizer state or a library's workspace is that.
        """
        found = allocations(trace)
        end = np.where(found.end < 0, np.iinfo(found.end.dtype).max, found.end)
        result = self._at(trace, self.saved)
        for span in self._kept_spans():
            result |= (span.begin <= found.start) & (found.start < span.end) & (end >= span.end)
        shown = ("weights", "gradients", "optimizer_state", "workspaces")
        result &= ~np.isin(found.category, [CATEGORY[name] for name in shown])
        return result & ~self._at(trace, self.made)

    def copies_at_peak(self, trace: Trace) -> int:
        """Bytes of what was kept and had the values of a weight in 16 bits."""
        which = self._at(trace, self.copies) & usage.alive(trace)
        return int(allocations(trace).requested_bytes[which].sum())

    def _at(self, trace: Trace, tensors: list[tuple[int, int]]) -> np.ndarray[Any, Any]:
        """The allocations that lay at these addresses then."""
        found = allocations(trace)
        end = np.where(found.end < 0, np.iinfo(found.end.dtype).max, found.end)
        result = np.zeros(len(found), np.bool_)
        numbers: dict[int, list[int]] = {}
        for number, address in enumerate(found.address.tolist()):
            numbers.setdefault(address, []).append(number)
        for at, address in tensors:
            for number in numbers.get(address, []):
                if found.start[number] < at <= end[number]:
                    result[number] = True
        return result

    def _kept_spans(self) -> Iterator[Span]:
        """What is made in each of these and alive at its end is an activation."""
        yield from self.recomputations
        for forward in self.forwards:
            after = (b.begin for b in self.backwards if b.begin >= forward.begin)
            following = (f.begin for f in self.forwards if f.begin > forward.begin)
            backward = next(after, None)
            if backward is not None and backward <= next(following, backward):
                yield Span(forward.begin, backward)
