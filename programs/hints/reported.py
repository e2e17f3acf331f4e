"""Mistakes from reports of other people's programs, each with its cure: what the finding advises."""

import asyncio
import contextlib
import functools
import gc
import io
import itertools
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from programs.hints.leaks import SICK, STEPS, train, trained
from programs.hints.sick import ROWS, WIDTH, Work, sick
from pytracer import trace

__all__ = ["SICK"]


# -------------------------------------------------------------------------- what a library is told


class AreaUnderCurve:
    """A metric that needs every prediction (Lightning-AI/torchmetrics#1461)."""

    def __init__(self) -> None:
        self.preds: list[Any] = []

    def update(self, preds: Any) -> None:
        self.preds.append(preds)


@sick("growth", "`metric.preds` keeps", "item()")
def a_metric_that_keeps_logits(mended: bool) -> trace:
    metric = AreaUnderCurve()
    return train(Work(), lambda out: metric.update(out.mean().item() if mended else out))


class CollectOutputs:
    """A callback."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_step_end(self, out: Any) -> None:
        self.outputs.append(out)


@sick("growth", ".outputs` keeps", "item()")
def a_callback_that_keeps_outputs(mended: bool) -> trace:
    work, callbacks = Work(), [CollectOutputs()]
    with work.traced() as t:
        for x in work.steps(STEPS):
            out = work.model(x)
            for callback in callbacks:
                callback.on_step_end(out.mean().item() if mended else out.detach() * 1)  # here
            work.learn(work.loss(out))
    return t


@sick("growth", "`seen` keeps", "item()")
def hooks_that_keep_gradients(mended: bool) -> trace:
    work, seen = Work(), list[Any]()
    for parameter in work.model.parameters():
        parameter.register_hook(lambda g: seen.append(g.mean().item() if mended else g.clone()))
    with work.traced() as t:
        for x in work.steps(STEPS):
            work.learn(work.loss(work.model(x)))
    return t


@sick("growth", "`history` keeps", "grad_fn -> saved tensor", "item()")
def auxiliary_losses_in_a_log(mended: bool) -> trace:
    work, history = Work(), list[dict[str, Any]]()
    with work.traced() as t:
        for step, x in enumerate(work.steps(STEPS)):
            out = work.model(x)
            spread = (out.exp() * out).mean()  # here
            history.append({"step": step, "kl": spread.item() if mended else spread})
            work.learn(work.loss(out))
    return t


# -------------------------------------------------------------------------- caches


class Gated(nn.Module):
    """Caches by its input, and no two inputs are the same (huggingface/transformers#45412)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    @functools.cache  # noqa: B019 - the mistake
    def mask(self, x: Tensor) -> Tensor:
        return (x > 0).float()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * self.mask(x)
        return y


class GatedAndCleared(Gated):
    """The same, and it clears its cache."""

    def forward(self, x: Tensor) -> Tensor:
        self.mask.cache_clear()
        return super().forward(x)


@sick("growth", "`Gated.mask` keeps", "call Gated.mask.cache_clear()")
def a_cache_on_a_method(mended: bool) -> trace:
    Gated.mask.cache_clear()
    return trained(GatedAndCleared() if mended else Gated())


LOCAL = threading.local()


@sick("growth", "`LOCAL.cache` keeps", "LOCAL.cache -> dict[")
def a_cache_for_each_thread(mended: bool) -> trace:
    LOCAL.cache = {}
    steps = itertools.count()
    try:
        return train(Work(), lambda out: LOCAL.cache.__setitem__(0 if mended else next(steps), out))
    finally:
        del LOCAL.cache


FEATURES: weakref.WeakKeyDictionary[nn.Module, list[Tensor]] = weakref.WeakKeyDictionary()


@sick("growth", "`FEATURES` keeps", "FEATURES -> WeakKeyDictionary -> list -> tensor")
def a_weak_dictionary_with_a_model_that_stays(mended: bool) -> trace:
    work = Work()
    FEATURES[work.model] = []

    def keep(out: Tensor) -> None:
        FEATURES[work.model].append(out)
        del FEATURES[work.model][: -1 if mended else 0]

    return train(work, keep)


class Positions(nn.Module):
    """Makes a buffer for each length that it meets."""

    def __init__(self, *, mended: bool) -> None:
        super().__init__()
        self.layer, self.calls, self.mended = nn.Linear(WIDTH, WIDTH), 0, mended

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not self.mended
        self.register_buffer(f"mask_{self.calls}", torch.ones(ROWS, WIDTH))  # here
        y: Tensor = self.layer(x) * getattr(self, f"mask_{self.calls}")
        return y


@sick("growth", "`model.mask_*` keeps", "use one `model.mask_*` again")
def a_new_buffer_in_each_step(mended: bool) -> trace:
    return trained(Positions(mended=mended))


@sick("growth", "`log` keeps", "log -> ndarray -> tensor")
def an_array_of_objects(mended: bool) -> trace:
    log, steps = np.empty(100, object), itertools.count()
    return train(
        Work(), lambda out: log.__setitem__(next(steps), out.mean().item() if mended else out)
    )


class Sample:
    """Each one registers itself."""

    made: list["Sample"] = []  # noqa: RUF012 - the mistake

    def __init__(self, value: Tensor, *, mended: bool) -> None:
        self.value = value
        self.made.append(self)
        del self.made[: -1 if mended else 0]


@sick("growth", "`Sample.made` keeps", "Sample.made -> list -> Sample.value -> tensor")
def a_registry_of_all_instances(mended: bool) -> trace:
    try:
        return train(Work(), lambda out: Sample(out, mended=mended) and None)
    finally:
        Sample.made.clear()


# -------------------------------------------------------------------------- what Python's library keeps


@sick("growth", "`batches` keeps", "itertools.cycle keeps all")
def a_loader_in_a_cycle(mended: bool) -> trace:
    """pytorch/pytorch#23900."""
    work, data = Work(), TensorDataset(torch.randn(ROWS * STEPS, WIDTH))
    loader = DataLoader(data, ROWS)
    batches = (each for _ in range(2) for each in loader) if mended else itertools.cycle(loader)
    with work.traced() as t:
        for _ in range(STEPS):
            (x,) = next(batches)
            work.learn(work.loss(work.model(x)))
    return t


@sick("growth", "`pending` keeps", "let go of each future")
def futures_that_are_done(mended: bool) -> trace:
    pending = list[Future[Tensor]]()

    def keep(out: Tensor) -> None:
        pending.append(pool.submit(out.mul, 2))
        pending[-1].result()
        del pending[: len(pending) if mended else 0]

    with ThreadPoolExecutor(1) as pool:
        return train(Work(), keep)


@sick("growth", "`tasks` keeps", "let go of each task")
def tasks_that_are_done(mended: bool) -> trace:
    async def doubled(out: Tensor) -> Tensor:
        return out * 2  # here

    async def learn() -> trace:
        work, tasks = Work(), list[asyncio.Task[Tensor]]()
        with work.traced() as t:
            for x in work.steps(STEPS):
                out = work.model(x)
                tasks.append(asyncio.create_task(doubled(out.detach())))
                await asyncio.sleep(0)
                del tasks[: len(tasks) if mended else 0]
                work.learn(work.loss(out))
        return t

    return asyncio.run(learn())


@sick("growth", "`log._mock_", "call reset_mock()")
def a_mock_in_place_of_a_logger(mended: bool) -> trace:
    log = mock.Mock()

    def keep(out: Tensor) -> None:
        log.info("out", out)
        if mended:
            log.reset_mock()

    return train(Work(), keep)


# -------------------------------------------------------------------------- cycles


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """As large trainings do it, so that all ranks collect at the same time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


class Exponential(torch.autograd.Function):
    """Keeps its output on its ctx (pytorch/pytorch#25340)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mended: bool) -> Tensor:
        out = x.exp()  # here
        if mended:
            ctx.save_for_backward(out)
        else:
            ctx.out = out
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (out,) = ctx.saved_tensors or (ctx.out,)
        return slope * out, None


@sick("growth", "`Exponential's ctx.out` keeps", "ctx.save_for_backward(...)")
def an_output_on_its_own_ctx(mended: bool) -> trace:
    work = Work()
    with without_collector(), work.traced() as t:
        for x in work.steps(STEPS):
            work.learn(work.loss(Exponential.apply(work.model(x), mended)))
    return t


@sick("growth", "`seen` keeps", "a cycle: ", "use x.detach() in a hook of x")
def a_hook_with_its_own_tensor(mended: bool) -> trace:
    """jacobgil/pytorch-grad-cam#88."""
    work = Work()

    def watch(out: Tensor, seen: Tensor) -> None:
        out.register_hook(lambda slope: slope * (seen > 0))

    with work.traced() as t:
        for x in work.steps(STEPS):
            out = work.model(x)
            watch(out, out.detach() if mended else out)
            work.learn(work.loss(out))
    return t


class Episode:
    """Refers to itself, as by a bound method in an attribute."""

    def __init__(self, out: Tensor, *, mended: bool) -> None:
        self.out, self.itself = out, None if mended else self


@sick("growth", "`Episode.out` keeps", "gc.collect()")
def cycles_without_a_collector(mended: bool) -> trace:
    """NVlabs/GR00T-WholeBodyControl#220."""
    with without_collector():
        return train(Work(), lambda out: Episode(out, mended=mended) and None)


# -------------------------------------------------------------------------- models and optimizers


@sick("growth", "`schedulers` keeps", "use one optimizer")
def an_optimizer_for_each_epoch(mended: bool) -> trace:
    work, schedulers = Work(), list[StepLR]()
    with work.traced() as t:
        for _epoch in range(6):
            optimizer = torch.optim.Adam(work.model.parameters())
            schedulers.append(StepLR(optimizer, 2))
            del schedulers[: -1 if mended else 0]
            for x in work.steps(2):
                work.loss(work.model(x)).backward()
                optimizer.step()  # here
                optimizer.zero_grad()
    return t


@sick("held", "only `state` keeps", "del state")
def a_checkpoint_that_stays_after_loading(mended: bool) -> trace:
    """karpathy/nanoGPT#533."""
    work, file = Work(), io.BytesIO()
    work.optimizer = torch.optim.AdamW(work.model.parameters(), fused=True)
    torch.save({"model": work.model.state_dict(), "step": 7}, file)
    file.seek(0)
    with work.traced() as t:
        state = torch.load(file)
        work.model.load_state_dict(state["model"])
        if mended:
            del state
        for x in work.steps(STEPS):
            work.learn(work.loss(work.model(x)))
    return t


@sick("evaluation", "calls of Sequential", "torch.no_grad()")
def predictions_with_their_graphs(mended: bool) -> trace:
    work, predictions = Work(), list[Tensor]()
    with work.traced() as t:
        for x in work.steps(3):
            work.learn(work.loss(work.model(x)))
        work.model.eval()
        for x in work.steps(4):
            with torch.set_grad_enabled(not mended):
                predictions.append(work.model(x))  # here
        assert len(torch.cat(predictions)) == 4 * ROWS
    return t


@sick("late_zero_grad", "optimizer.zero_grad(set_to_none=True)")
def gradients_that_are_set_to_zero(mended: bool) -> trace:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)), nn.Linear(512, 8192))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trace(model, optimizer, stacks=True, devices="cpu", table=False) as t:
        for _ in range(4):
            optimizer.zero_grad(set_to_none=mended)
            with torch.no_grad():
                wanted = model(torch.randn(512, 512)).softmax(-1)
            out = model(torch.randn(512, 512))
            loss = (out.softmax(-1) - wanted).square().sum()  # here
            del out, wanted
            loss.backward()
            optimizer.step()
    return t


@sick("hint", "`teacher`", "requires_grad_(False)")
def a_teacher_that_is_not_frozen(mended: bool) -> trace:
    """lightly-ai/lightly-train#352."""
    work = Work()
    teacher = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, WIDTH))
    teacher.requires_grad_(not mended)
    with work.traced(teacher) as t:
        for x in work.steps(STEPS):
            work.learn((work.model(x) - teacher(x)).square().mean())
    return t


# -------------------------------------------------------------------------- what an optimizer has


def fused(*models: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for model in models for p in model.parameters()]
    return torch.optim.AdamW(parameters, fused=True)


@sick("left_behind", "optimizer` keeps them", "make a new optimizer")
def a_head_that_was_replaced(mended: bool) -> trace:
    work = Work()
    optimizer = work.optimizer = fused(work.model)
    with work.traced() as t:
        for epoch in range(2):
            for x in work.steps(3):
                work.loss(work.model(x)).backward()
                optimizer.step()
                optimizer.zero_grad()
            if epoch == 0:
                work.model[4] = nn.Linear(256, WIDTH)
                if mended:
                    optimizer = work.optimizer = fused(work.model)
                else:
                    optimizer.add_param_group({"params": work.model[4].parameters()})
    return t


@sick("left_behind", "`scheduler.optimizer` keeps them", "drop the old one")
def a_scheduler_of_a_model_that_is_gone(mended: bool) -> trace:
    scheduler = None
    with trace(stacks=True, devices="cpu", table=False) as t:
        for _fold in range(2):
            model = nn.Sequential(nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, WIDTH))
            optimizer = fused(model)
            scheduler = StepLR(optimizer, 2) if mended or scheduler is None else scheduler
            for _ in range(4):
                model(torch.randn(ROWS, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return t


@sick("hint", "gradients of `decoder`", "zero_grad(set_to_none=True) of its optimizer")
def one_of_two_optimizers_that_drops_gradients(mended: bool) -> trace:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU())
    decoder = nn.Linear(1024, 1024)
    first, second = fused(encoder), fused(decoder)
    with trace(encoder, decoder, first, second, stacks=True, devices="cpu", table=False) as t:
        for _ in range(STEPS):
            decoder(encoder(torch.randn(1024, WIDTH))).exp().mean().backward()
            for optimizer in (first, second):
                optimizer.step()
            first.zero_grad()
            if mended:
                second.zero_grad()
    return t


@sick("hint", "gradients of `decoder`", "decoder.requires_grad_(False)")
def an_optimizer_that_never_steps(mended: bool) -> trace:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU())
    decoder = nn.Linear(1024, 1024).requires_grad_(not mended)
    first, second = fused(encoder), fused(decoder)
    with trace(encoder, decoder, first, second, stacks=True, devices="cpu", table=False) as t:
        for _ in range(STEPS):
            decoder(encoder(torch.randn(ROWS, WIDTH))).square().mean().backward()
            first.step()
            first.zero_grad()
    return t


# -------------------------------------------------------------------------- graphs and shapes


@sick("retained", "`loss` keeps its graph", "leave out retain_graph=True")
def a_graph_that_backward_retains(mended: bool) -> trace:
    work = Work()
    with work.traced() as t:
        for x in work.steps(STEPS):
            loss = work.loss(work.model(x.repeat(8, 1)))
            loss.backward(retain_graph=not mended)
            work.optimizer.step()
            work.optimizer.zero_grad()
    return t


@sick("growth", "`masks` keeps", "masks -> dict[", "bound")
def a_cache_by_shape(mended: bool) -> trace:
    work, masks = Work(), dict[int, Tensor]()
    with work.traced() as t:
        for rows in (100, 64, 180, 90, 128, 201, 77, 150, 110, 99, 131):
            if mended:
                masks.clear()
            if rows not in masks:
                masks[rows] = torch.ones(rows, rows).tril()  # here
            work.learn(work.loss(masks[rows] @ work.model(torch.randn(rows, WIDTH))))
    return t
