"""Leaks by all ways in which a program keeps things: each named with its way, and each with its cure."""

import copy
import functools
import itertools
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from programs.hints import sick as others
from programs.hints.sick import ROWS, SICK, WIDTH, Work, sick
from pytracer import trace

__all__ = ["SICK"]
STEPS = 8


def train(work: Work, keep: Callable[[Tensor], object]) -> trace:
    """Trains, and gives each step's output away before its backward."""
    with work.traced() as t:
        for x in work.steps(STEPS):
            out = work.model(x)
            keep(out.detach() * 1)
            work.learn(work.loss(out))
    return t


# -------------------------------------------------------------------------- graphs


@sick("growth", "`total` keeps", "total -> tensor -> grad_fn -> saved tensor", "torch.no_grad()")
def a_sum_of_losses_that_are_not_trained_on(mended: bool) -> trace:
    work = Work()
    total = torch.zeros(())
    with work.traced() as t:
        for x in work.steps(STEPS):
            out = work.model(x)
            with torch.set_grad_enabled(not mended):
                extra = work.loss(work.model(x).exp())
            total += extra
            work.learn(work.loss(out) + extra.detach())
    return t


@sick("growth", "`penalties` keeps", "penalties -> list -> tensor -> grad_fn -> saved tensor")
def penalties_with_the_graph_of_a_gradient(mended: bool) -> trace:
    work, penalties = Work(), list[Any]()
    work.model.insert(1, nn.Tanh())
    with work.traced() as t:
        for x in work.steps(STEPS):
            x.requires_grad_()
            score = work.model(x).square().sum()
            (slope,) = torch.autograd.grad(score, x, create_graph=not mended)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            penalties.append(penalty.item() if mended else penalty)
            work.learn(work.loss(work.model(x.detach())))
    return t


@sick("growth", "`model`", "parameter -> Parameter.grad -> tensor -> grad_fn -> saved tensor")
def gradients_with_graphs_that_are_never_dropped(mended: bool) -> trace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trace(model, optimizer, stacks=True, devices="cpu", table=False) as t:
        for _ in range(STEPS):
            model(torch.randn(ROWS, WIDTH)).square().mean().backward(create_graph=True)
            optimizer.step()
            if mended:
                optimizer.zero_grad()
    return t


# -------------------------------------------------------------------------- containers


@sick("growth", "`epochs` keeps", "epochs -> list -> list -> tensor")
def outputs_of_each_epoch_in_lists(mended: bool) -> trace:
    work, epochs = Work(), list[Any]()
    with work.traced() as t:
        for _epoch in range(4):
            outputs = list[Any]()
            for x in work.steps(3):
                out = work.model(x)
                outputs.append(out.mean().item() if mended else out.detach() * 1)  # here
                work.learn(work.loss(out))
            epochs.append(outputs)
            del outputs
    return t


@sick("growth", "`snapshots` keeps", "snapshots -> list -> parameter")
def models_copied_with_their_gradients(mended: bool) -> trace:
    work, snapshots = Work(), list[nn.Module]()
    with work.traced() as t:
        for x in work.steps(STEPS):
            work.loss(work.model(x)).backward()
            work.optimizer.step()
            del snapshots[: None if mended else 0]
            snapshots.append(copy.deepcopy(work.model))
            work.optimizer.zero_grad()
    return t


@sick("growth", "`cache` keeps", "cache -> dict[(", "] -> tensor")
def a_cache_by_shape_and_step(mended: bool) -> trace:
    cache = dict[tuple[int, torch.Size], Tensor]()
    steps = itertools.count()

    def keep(out: Tensor) -> None:
        cache[0 if mended else next(steps), out.shape] = out

    return train(Work(), keep)


@sick("growth", "`recent` keeps", "recent -> deque -> tensor", "bound")
def a_deque_without_a_bound(mended: bool) -> trace:
    recent = deque[Tensor](maxlen=1 if mended else None)
    return train(Work(), recent.append)


@sick("growth", "`waiting.queue` keeps", "waiting.queue -> deque -> tensor")
def a_queue_that_nobody_empties(mended: bool) -> trace:
    waiting = queue.Queue[Tensor]()

    def keep(out: Tensor) -> None:
        waiting.put(out)
        if mended:
            waiting.get()

    return train(Work(), keep)


@sick("growth", "`arrays` keeps", "arrays -> list -> ndarray.base -> tensor")
def arrays_that_share_their_memory_with_tensors(mended: bool) -> trace:
    arrays = list[Any]()
    return train(Work(), lambda out: arrays.append(out.numpy().mean() if mended else out.numpy()))


@sick("growth", "`sick.CACHE` keeps", "programs/hints/sick.py sick.CACHE -> dict[")
def a_global_of_another_module(mended: bool) -> trace:
    others.CACHE.clear()
    steps = itertools.count()
    keep = others.CACHE.__setitem__
    try:
        return train(Work(), lambda out: keep(0 if mended else next(steps), out))
    finally:
        others.CACHE.clear()


# -------------------------------------------------------------------------- objects


class Seen(nn.Module):
    """Shows what it has seen, in a public or in a private attribute."""

    history: list[Tensor]

    def __init__(self, *, public: bool) -> None:
        super().__init__()
        self._history: list[Tensor] = []
        self._mended = False
        if public:
            self.history = []

    def forward(self, x: Tensor) -> Tensor:
        kept = self.history if hasattr(self, "history") else self._history
        if self._mended:
            kept.clear()
        kept.append(x.detach() * 1)  # here
        return x


def watched(seen: Seen, *, mended: bool) -> trace:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), seen, nn.Linear(WIDTH, WIDTH))
    seen._mended = mended
    del seen
    return trained(model)


def trained(model: nn.Module, steps: int = STEPS) -> trace:
    """The model in training by squares."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trace(model, optimizer, stacks=True, devices="cpu", table=False) as t:
        for _ in range(steps):
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return t


@sick("growth", "`model[1].history` keeps", "model[1].history -> list -> tensor")
def an_attribute_of_a_module(mended: bool) -> trace:
    return watched(Seen(public=True), mended=mended)


@sick("growth", "`model[1]._history` keeps", "model[1]._history -> list -> tensor")
def a_private_attribute_of_a_module(mended: bool) -> trace:
    return watched(Seen(public=False), mended=mended)


@sick("growth", "`model[*]._history` keeps", "]._history -> list -> tensor")
def an_attribute_of_each_layer(mended: bool) -> trace:
    work = Work()
    layers = [Seen(public=False) for _ in range(4)]
    model = nn.Sequential(work.model, *layers)
    for layer in layers:
        layer._mended = mended
    del layers, layer
    with work.traced(model) as t:
        for x in work.steps(STEPS):
            work.learn(work.loss(model(x)))
    return t


class Meter:
    """Its list belongs to the class, and so to all of them."""

    values: list[Tensor] = []  # noqa: RUF012 - the mistake

    def __init__(self, *, mended: bool) -> None:
        if mended:
            self.values = []

    def add(self, value: Tensor) -> None:
        self.values.append(value)


@sick("growth", "`Meter.values` keeps", "Meter.values -> list -> tensor")
def an_attribute_of_a_class(mended: bool) -> trace:
    Meter.values.clear()
    try:
        return train(Work(), lambda out: Meter(mended=mended).add(out))
    finally:
        Meter.values.clear()


class Average:
    """Collects what it is given."""

    def __init__(self, most: int | None) -> None:
        self.parts = deque[Tensor](maxlen=most)

    def add(self, value: Tensor) -> None:
        self.parts.append(value)


@sick("growth", "`keep.__self__.parts` keeps", "keep.__self__.parts -> deque -> tensor")
def a_bound_method(mended: bool) -> trace:
    return train(Work(), Average(1 if mended else None).add)


@dataclass(slots=True)
class Row:
    """A record without a dictionary."""

    value: Tensor
    before: "Row | None"


@sick("growth", "`last.before.value` keeps", "last.before.value -> tensor")
def records_that_refer_to_the_last(mended: bool) -> trace:
    work, last = Work(), None
    with work.traced() as t:
        for x in work.steps(STEPS):
            out = work.model(x)
            last = Row(out.detach() * 1, None if mended else last)  # here
            work.learn(work.loss(out))
    return t


# -------------------------------------------------------------------------- functions


def closure(*, mended: bool) -> Callable[[Tensor], None]:
    hidden = list[Tensor]()

    def add(out: Tensor) -> None:
        hidden.append(out)
        del hidden[: -1 if mended else 0]

    return add


@sick(
    "growth", "`hidden` keeps", "keep -> closure of closure.<locals>.add: hidden -> list -> tensor"
)
def a_closure(mended: bool) -> trace:
    return train(Work(), closure(mended=mended))


def collect(layer: nn.Module, *, mended: bool) -> None:
    add = closure(mended=mended)
    layer.register_forward_hook(lambda _module, _given, out: add(out.detach() * 1))


@sick("growth", "`hidden` keeps", "_forward_hooks -> OrderedDict[", "closure of", "hidden -> list")
def a_hook_that_appends_in_a_closure(mended: bool) -> trace:
    work = Work()
    collect(work.model[2], mended=mended)
    with work.traced() as t:
        for x in work.steps(STEPS):
            work.learn(work.loss(work.model(x)))
    return t


@sick("growth", "`rows` keeps", "default of", "rows -> list -> tensor")
def a_default_argument(mended: bool) -> trace:
    def collect(out: Tensor, rows: list[Tensor] | None = None if mended else []) -> None:
        (rows if rows is not None else []).append(out)

    return train(Work(), collect)


@sick("growth", "`keep.args` keeps", "keep.args -> tuple -> list -> tensor")
def a_partial(mended: bool) -> trace:
    def add(rows: list[Tensor], out: Tensor) -> None:
        rows.append(out)
        del rows[: -1 if mended else 0]

    return train(Work(), functools.partial(add, []))


@sick("growth", "`positions` keeps", "lru_cache -> dict[", "maxsize")
def an_lru_cache_without_a_bound(mended: bool) -> trace:
    @functools.lru_cache(maxsize=1 if mended else None)
    def positions(_length: int) -> Tensor:
        return torch.zeros(ROWS, WIDTH)  # here

    lengths = itertools.count()
    return train(Work(), lambda out: out.add_(positions(next(lengths))))


def running(*, mended: bool) -> Generator[None, Tensor, None]:
    window = list[Tensor]()
    while True:
        window.append((yield))
        del window[: -1 if mended else 0]


@sick("growth", "`window` keeps", "generator running (", "window -> list -> tensor")
def a_generator(mended: bool) -> trace:
    average = running(mended=mended)
    next(average)
    return train(Work(), average.send)


# -------------------------------------------------------------------------- what the interpreter keeps


@sick("growth", "`errors` keeps", "ValueError.__traceback__ -> frame of", "traceback")
def exceptions_that_are_kept(mended: bool) -> trace:
    errors = list[Any]()

    def check(out: Tensor) -> None:
        try:
            raise ValueError(out.shape)
        except ValueError as error:
            errors.append(str(error) if mended else error)

    return train(Work(), check)


@sick("growth", "`collected` keeps", "thread collector: ", "collected -> list -> tensor")
def a_list_of_another_thread(mended: bool) -> trace:
    given, taken = queue.Queue[Tensor | None](), threading.Semaphore(0)

    def collect() -> None:
        collected = list[Tensor]()
        while (out := given.get()) is not None:
            collected.append(out)
            del collected[: -1 if mended else 0]
            del out
            taken.release()

    def keep(out: Tensor) -> None:
        given.put(out)
        del out
        taken.acquire()

    thread = threading.Thread(target=collect, name="collector")
    thread.start()
    try:
        return train(Work(), keep)
    finally:
        given.put(None)
        thread.join()


class Kept(logging.Handler):
    """Keeps records, as handlers of tests and of dashboards do."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@sick(
    "growth", "logging.getLogger('programs.hints.leaks').handlers", "Kept.records", "LogRecord.args"
)
def records_of_a_logger(mended: bool) -> trace:
    logger = logging.getLogger(__name__)
    logger.handlers, logger.propagate = [Kept()], False
    logger.setLevel("INFO")
    log = logging.getLogger(__name__).info
    del logger
    try:
        return train(Work(), lambda out: log("%s", out.mean().item() if mended else out))
    finally:
        logging.getLogger(__name__).handlers.clear()


@sick("growth", "`strong` keeps", "strong -> set -> tensor")
def weak_references_beside_a_set(mended: bool) -> trace:
    """A weak reference keeps nothing, though it comes first."""
    seen = list[weakref.ref[Tensor]]()
    strong = set[Tensor]()

    def keep(out: Tensor) -> None:
        seen.append(weakref.ref(out))
        if not mended:
            strong.add(out)

    return train(Work(), keep)
