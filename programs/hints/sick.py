"""Programs with one mistake each, of those that people really make. `# here` marks the line that makes
what is kept, `words` are what the finding must say: the variable that keeps it, and what to do.

Each runs a second time with its cure: the change that is advised.
"""

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pytracer import trace

ROWS, WIDTH = 64, 128


@dataclass(frozen=True)
class Sick:
    """A program, and what is to be found in it."""

    run: Callable[[], trace]
    mended: Callable[[], trace]  # the same with the change that is advised
    kind: str
    words: tuple[str, ...]

    def lines(self) -> list[str]:
        """The lines that are marked: "sick.py:80"."""
        run = getattr(self.run, "func", self.run)
        text, first = inspect.getsourcelines(run)
        file = Path(inspect.getfile(run)).name
        return [f"{file}:{first + i}" for i, line in enumerate(text) if "# here" in line]


SICK: dict[str, Sick] = {}
_Run = Callable[[bool], trace]


def sick(kind: str, *words: str) -> Callable[[_Run], _Run]:
    """Adds a program that is told whether to make its mistake or the change that is advised."""

    def add(run: _Run) -> _Run:
        makes_it, mended = functools.partial(run, False), functools.partial(run, True)
        SICK[run.__name__] = Sick(makes_it, mended, kind, words)
        return run

    return add


class Work:
    """A model in training, and everything right about it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, WIDTH)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def traced(self, *more: Any) -> Any:
        targets = (self.model, self.optimizer, *more)
        return trace(*targets, stacks=True, devices="cpu", table=False)

    def loss(self, out: Tensor) -> Tensor:
        return out.square().mean()

    def learn(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int = 6) -> Iterator[Tensor]:
        """Batches; between two of them a step is taken."""
        for _ in range(count):
            yield torch.randn(ROWS, WIDTH)


# -------------------------------------------------------------------------- growth


@sick("growth", "`history` keeps", "item()")
def outputs_in_a_list(mended: bool) -> trace:
    work, history = Work(), []
    with work.traced() as t:
        for x in work.steps():
            out = work.model(x)
            history.append(out.mean().item() if mended else out.detach() * 1)  # here
            work.learn(work.loss(out))
    return t


@sick("hint", "`losses` still held")
def losses_with_their_graphs_in_a_list(mended: bool) -> trace:
    work, losses = Work(), []
    with work.traced() as t:
        for x in work.steps():
            with torch.set_grad_enabled(not mended):
                loss = work.loss(work.model(x))  # here
            losses.append(loss)
    return t


@sick("hint", "`total` still held")
def losses_summed_with_their_graphs(mended: bool) -> trace:
    work = Work()
    with work.traced() as t:
        total = torch.zeros(())
        for x in work.steps():
            with torch.set_grad_enabled(not mended):
                loss = work.loss(work.model(x))  # here
            total = total + loss
    assert total.requires_grad is not mended
    return t


@sick("growth", "`batches` keeps", "bound")
def batches_in_a_list(mended: bool) -> trace:
    work, batches = Work(), []
    with work.traced() as t:
        for _ in range(6):
            x = torch.randn(ROWS, WIDTH)  # here
            batches.append(x.mean().item() if mended else x)
            work.learn(work.loss(work.model(x)))
    return t


@sick("growth", "`features` keeps")
def features_in_a_dictionary(mended: bool) -> trace:
    work, features = Work(), dict[int, Tensor]()
    with work.traced() as t:
        for i, x in enumerate(work.steps()):
            hidden = work.model[:2](x)
            features[0 if mended else i] = hidden.detach() * 2  # here
            work.learn(work.loss(work.model[2:](hidden)))
    return t


@sick("growth", "`norms` keeps")
def gradients_in_a_list(mended: bool) -> trace:
    work, norms = Work(), []
    with work.traced() as t:
        for x in work.steps():
            work.loss(work.model(x)).backward()
            sizes = [p.grad.abs() for p in work.model.parameters()]  # here
            norms.append([each.mean().item() for each in sizes] if mended else sizes)
            del sizes
            work.optimizer.step()
            work.optimizer.zero_grad()
    return t


@sick("growth", "`snapshots` keeps")
def weights_of_each_step_in_a_list(mended: bool) -> trace:
    work, snapshots = Work(), deque[list[Tensor]](maxlen=1 if mended else None)
    with work.traced() as t:
        for x in work.steps():
            work.learn(work.loss(work.model(x)))
            snapshots.append([p.detach().clone() for p in work.model.parameters()])  # here
    return t


@sick("growth", "`replay` keeps", "bound")
def a_replay_buffer_without_a_bound(mended: bool) -> trace:
    work, replay = Work(), deque[tuple[Tensor, Tensor]](maxlen=1 if mended else None)
    with work.traced() as t:
        for _ in range(6):
            with torch.no_grad():
                seen = torch.randn(ROWS, WIDTH)
                reward = work.model(seen).sum(-1)
            replay.append((seen * 2, reward))  # here
            work.learn(work.loss(work.model(seen)))
    return t


@sick("growth", "is made anew in each, and larger", "buffer")
def predictions_concatenated_in_each_step(mended: bool) -> trace:
    work = Work()
    with work.traced() as t:
        seen, means = torch.zeros(0, WIDTH), []
        for x in work.steps(8):
            out = work.model(x)
            if mended:
                means.append(out.mean().item())
            else:
                seen = torch.cat([seen, out.detach()])  # here
            work.learn(work.loss(out))
    return t


class Logger:
    """As a LightningModule that collects its outputs."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []


@sick("growth", "`logger.outputs` keeps", "item()")
def outputs_in_an_attribute(mended: bool) -> trace:
    work, logger = Work(), Logger()
    with work.traced() as t:
        for x in work.steps():
            out = work.model(x)
            shown = out.detach() + 0  # here
            logger.outputs.append(shown.mean().item() if mended else shown)
            del shown
            work.learn(work.loss(out))
    return t


@sick("growth", "`seen` keeps")
def a_hook_that_collects(mended: bool) -> trace:
    work, seen = Work(), []

    def collect(_module: nn.Module, _given: Any, out: Tensor) -> None:
        seen.append(out.mean().item() if mended else out.detach() * 1)  # here

    hook = work.model[1].register_forward_hook(collect)
    with work.traced() as t:
        for x in work.steps():
            work.learn(work.loss(work.model(x)))
    hook.remove()
    return t


@sick("growth", "`metrics` keeps", "item()")
def metrics_as_tensors(mended: bool) -> trace:
    work, metrics = Work(), dict[str, list[Any]](error=[])
    with work.traced() as t:
        for x in work.steps():
            out = work.model(x)
            error = (out - x).abs().detach()  # here
            metrics["error"].append(error.mean().item() if mended else error)
            del error
            work.learn(work.loss(out))
    return t


@sick("growth", "`state` keeps", "torch.no_grad()")
def a_recurrent_state_that_is_never_detached(mended: bool) -> trace:
    """An agent acts with it, and learns from something else."""
    work, cell = Work(), nn.GRUCell(WIDTH, 64)
    work.optimizer.add_param_group({"params": cell.parameters()})
    with work.traced(cell) as t:
        state = torch.zeros(ROWS, 64)
        for x in work.steps():
            with torch.set_grad_enabled(not mended):
                state = cell(x, state)  # here
            work.learn(work.loss(work.model(x)) + cell(x).square().mean())
    assert state.requires_grad is not mended
    return t


@sick("hint", "`all_logits` still held")
def logits_of_an_evaluation_in_a_list(mended: bool) -> trace:
    work, all_logits = Work(), []
    with work.traced() as t, torch.no_grad():
        for x in work.steps(8):
            logits = work.model(x) * 2  # here
            all_logits.append(logits.mean().item() if mended else logits)
            del logits
    return t


CACHE: dict[int, Tensor] = {}


@sick("growth", "`CACHE` keeps")
def a_global_cache_with_a_new_key_in_each_step(mended: bool) -> trace:
    work = Work()
    CACHE.clear()
    with work.traced() as t:
        for i, x in enumerate(work.steps()):
            key = 0 if mended else i
            CACHE[key] = x.repeat(2, 1)  # here
            work.learn(work.loss(work.model(CACHE[key])))
    CACHE.clear()
    return t


@sick("growth", "keeps what each step makes")
def functions_that_hold_their_tensors(mended: bool) -> trace:
    work, later = Work(), []
    with work.traced() as t:
        for x in work.steps():
            out = work.model(x)
            shown = out.detach() * 2  # here
            shown = shown.mean().item() if mended else shown
            later.append(lambda shown=shown: shown)
            work.learn(work.loss(out))
    return t


# -------------------------------------------------------------------------- evaluations


def deep(out: int) -> nn.Module:
    """A model whose forward is the peak if autograd keeps it."""
    hidden = (layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Tanh()))
    return nn.Sequential(nn.Linear(WIDTH, 512), *hidden, nn.Linear(512, out))


@sick("evaluation", "calls of Sequential", "torch.no_grad()")
def a_validation_with_grad_mode_on(mended: bool) -> trace:
    work = Work()
    with work.traced() as t:
        for x in work.steps():
            work.learn(work.loss(work.model(x)))
            with torch.set_grad_enabled(not mended):
                out = work.model(x.repeat(8, 1))  # here
            out = work.loss(out).item()
    return t


@sick("evaluation", "calls of Sequential", "torch.no_grad()")
def a_validation_that_sums_losses(mended: bool) -> trace:
    work = Work()
    with work.traced() as t:
        for x in work.steps(2):
            work.learn(work.loss(work.model(x)))
            total = torch.zeros(())
            with torch.set_grad_enabled(not mended):
                for _ in range(4):
                    total = total + work.loss(work.model(x))  # here
    assert total.requires_grad is not mended
    return t


@sick("evaluation", "calls of Sequential", "torch.no_grad()")
def a_teacher_with_grad_mode_on(mended: bool) -> trace:
    work, teacher = Work(), deep(WIDTH)
    with work.traced(teacher) as t:
        for x in work.steps():
            with torch.set_grad_enabled(not mended):
                wanted = teacher(x).detach()  # here
            work.learn(work.loss(work.model(x) - wanted))
    return t


@sick("evaluation", "torch.no_grad()")
def a_target_network_with_grad_mode_on(mended: bool) -> trace:
    work, target = Work(), deep(4)
    with work.traced(target) as t:
        for x in work.steps():
            with torch.set_grad_enabled(not mended):
                best = target(x).max(-1).values.detach()  # here
            work.learn((work.model(x)[:, 0] - best).square().mean())
    return t


@sick("evaluation", "torch.no_grad()")
def a_metric_that_calls_the_model_again(mended: bool) -> trace:
    work = Work()
    with work.traced() as t:
        for x in work.steps():
            work.learn(work.loss(work.model(x)))
            with torch.set_grad_enabled(not mended):
                accuracy = (work.model(x.repeat(8, 1)) > 0).float().mean().item()  # here
    assert accuracy >= 0
    return t


@sick("evaluation", "torch.no_grad()")
def a_loss_that_is_not_trained_on(mended: bool) -> trace:
    work = Work()
    with work.traced() as t:
        for i, x in enumerate(work.steps(8)):
            loss = work.loss(work.model(x.repeat(4, 1)))  # here
            if i % 4 == 2:
                if mended:
                    del loss
                continue  # not finite, say
            work.learn(loss)
    return t


@sick("evaluation", "torch.no_grad()")
def features_of_a_model_that_is_not_trained(mended: bool) -> trace:
    work, backbone = Work(), deep(WIDTH)
    with work.traced(backbone) as t:
        for x in work.steps():
            with torch.set_grad_enabled(not mended):
                features = backbone(x)  # here
            work.learn(work.loss(work.model(features.detach())))
    return t


# -------------------------------------------------------------------------- held


class KeepsHidden(nn.Module):
    """Keeps what it computed last, for somebody to look at."""

    def __init__(self, *, mended: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)
        self.hidden: Tensor | None = None
        self.mended = mended

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.hidden = None if self.mended else hidden.detach() * 1  # here
        out: Tensor = self.last(hidden)
        return out


@sick("hint", "kept beside the graph")
def a_module_that_keeps_its_hidden_layer(mended: bool) -> trace:
    torch.manual_seed(0)
    model = KeepsHidden(mended=mended)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trace(model, optimizer, stacks=True, devices="cpu", table=False) as t:
        for _ in range(4):
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return t


@sick("held", "only `logits` keeps them", "del logits")
def a_variable_that_lives_through_backward(mended: bool) -> trace:
    work = Work()
    with work.traced() as t:
        for x in work.steps():
            logits = work.model(x).repeat(1, 8)  # here
            loss = logits.sum()
            if mended:
                del logits
            work.learn(loss)
    return t


class Masked(torch.autograd.Function):
    """Keeps a tensor past autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mended: bool) -> Tensor:
        mask = (x > 0).float().repeat(1, 4)  # here
        if mended:
            ctx.save_for_backward(mask)
        else:
            ctx.mask = mask
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (mask,) = ctx.saved_tensors or (ctx.mask,)
        return slope * mask[:, : slope.shape[1]], None


@sick("held", "Masked's ctx keeps them", "save_for_backward")
def a_tensor_on_ctx(mended: bool) -> trace:
    work = Work()
    with work.traced() as t:
        for x in work.steps():
            work.learn(work.loss(Masked.apply(work.model(x), mended)))
    return t


@sick("held", "only `parts` keeps them", "del parts")
def intermediate_results_in_a_list(mended: bool) -> trace:
    work = Work()
    with work.traced() as t:
        for x in work.steps():
            out = work.model(x)
            parts = [out * scale for scale in (1, 2, 3, 4)]  # here
            loss = sum(part.sum() for part in parts)
            if mended:
                del parts
            work.learn(loss)
    return t


# -------------------------------------------------------------------------- gradients


@sick("late_zero_grad", "optimizer.zero_grad() before that forward")
def gradients_that_live_through_the_forward(mended: bool) -> trace:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)), nn.Linear(512, 4096))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trace(model, optimizer, stacks=True, devices="cpu", table=False) as t:
        for _ in range(4):
            if mended:
                optimizer.zero_grad()
            out = model(torch.randn(1024, 512))
            loss = out.exp().sum()  # here
            if not mended:
                optimizer.zero_grad()
            del out
            loss.backward()
            optimizer.step()
    return t


# -------------------------------------------------------------------------- what costs nothing to save


@sick("hint", "AdamW(..., fused=True)", "31.9 MiB")
def an_optimizer_with_temporaries_of_its_own(mended: bool) -> trace:
    torch.manual_seed(0)
    model = nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=mended)
    with trace(model, optimizer, stacks=True, devices="cpu", table=False) as t:
        for _ in range(3):
            model(torch.randn(4, 2048)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return t


class ByHand(nn.Module):
    """GELU as papers write it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3))))


@sick("hint", "GELU that is written by hand", 'nn.GELU(approximate="tanh")')
def a_gelu_by_hand(mended: bool) -> trace:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 1024), nn.GELU("tanh") if mended else ByHand(), nn.Linear(1024, 8)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trace(model, optimizer, stacks=True, devices="cpu", table=False) as t:
        for _ in range(3):
            model(torch.randn(1024, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return t
