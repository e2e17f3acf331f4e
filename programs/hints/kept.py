"""Healthy programs that keep activations for what comes later, and so may not be told to delete them."""

from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm
from torch.utils.checkpoint import checkpoint

from programs.hints.healthy import HEALTHY, WIDTH, Work, healthy
from pytracer import trace

__all__ = ["HEALTHY"]
ROWS = 256


def trained(model: nn.Module, steps: int = 5, **options: Any) -> trace:
    """The model in training by squares, with stacks."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    with trace(model, optimizer, devices="cpu", stacks=True, table=False, **options) as t:
        for _ in range(steps):
            loss = model(torch.randn(ROWS, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return t


class Recurrent(nn.Module):
    """Attends to the hidden states of the step before, as Transformer-XL does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, memory: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        new = []
        for i, layer in enumerate(self.layers):
            new.append(x.detach())
            x = x + layer(torch.cat([x if memory is None else memory[i], x], 1)).tanh()
        return x, new


@healthy
def a_memory_that_the_next_step_reads(_: Path) -> trace:
    torch.manual_seed(0)
    model, memory = Recurrent(), None
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trace(model, optimizer, devices="cpu", stacks=True, table=False) as t:
        for _step in range(5):
            out, memory = model(torch.randn(ROWS, WIDTH), memory)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return t


@healthy
def a_difference_to_the_last_output(_: Path) -> trace:
    work, last = Work(), None
    with work.traced() as t:
        for _step in range(5):
            x = torch.randn(ROWS, WIDTH)
            out = work.model(x).repeat(1, 8)
            loss = out.sum() if last is None else (out - last).sum()
            last = out.detach()
            loss.backward()
            work.optimizer.step()
            work.optimizer.zero_grad()
    return t


@healthy
def outputs_that_are_looked_at_after_the_step(_: Path) -> trace:
    work, seen = Work(), 0
    with work.traced() as t:
        for _step in range(5):
            out = work.model(torch.randn(ROWS, WIDTH)).repeat(1, 8)
            out.sum().backward()
            work.optimizer.step()
            work.optimizer.zero_grad()
            seen += len(out.tolist())
    assert seen == 5 * ROWS
    return t


class Equilibrium(nn.Module):
    """Finds a fixed point, and solves for its gradient in a hook, through a graph that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.w.weight, std=0.02)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.w(z) + self.u(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(5):
                z = self.step(z, x)
        z = self.step(z, x)
        start = z.clone().detach().requires_grad_()
        again = self.step(start, x)

        def solve(slope: Tensor) -> Tensor:
            g = slope
            for _ in range(5):
                g = torch.autograd.grad(again, start, g, retain_graph=True)[0] + slope
            return g

        z.register_hook(solve)
        return z


@healthy
def a_fixed_point_with_a_hook(_: Path) -> trace:
    torch.manual_seed(0)
    return trained(nn.Sequential(nn.Linear(WIDTH, WIDTH), Equilibrium(), nn.Linear(WIDTH, 8)))


@healthy
def pruned_weights(_: Path) -> trace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, 8))
    prune.l1_unstructured(model[0], "weight", 0.5)
    return trained(model)


@healthy
def weights_with_a_norm_by_a_hook(_: Path) -> trace:
    torch.manual_seed(0)
    return trained(nn.Sequential(spectral_norm(nn.Linear(WIDTH, 512)), nn.Linear(512, 8)))


@healthy
def weights_with_a_norm_by_parametrization(_: Path) -> trace:
    torch.manual_seed(0)
    layer = parametrizations.weight_norm(nn.Linear(WIDTH, 512))
    return trained(nn.Sequential(layer, nn.GELU(), nn.Linear(512, 8)))


class Tuned(nn.Module):
    """A frozen embedding whose output requires grad, and checkpointed layers: how LoRA is trained."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Linear(WIDTH, 256).requires_grad_(requires_grad=False)
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(4)])
        self.embedding.register_forward_hook(lambda _m, _given, out: out.requires_grad_())

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = h + checkpoint(
                lambda h, layer=layer: layer(h).tanh(), h, use_reentrant=self.reentrant
            )
        return h


@healthy
def checkpoints_behind_a_frozen_embedding(_: Path) -> trace:
    torch.manual_seed(0)
    return trained(Tuned(reentrant=False))


@healthy
def reentrant_checkpoints_behind_a_frozen_embedding(_: Path) -> trace:
    torch.manual_seed(0)
    return trained(Tuned(reentrant=True))


@healthy
def sparse_gradients_of_an_embedding(_: Path) -> trace:
    torch.manual_seed(0)
    table, layer = nn.Embedding(5000, WIDTH, sparse=True), nn.Linear(WIDTH, 8)
    sparse = torch.optim.SparseAdam(table.parameters())
    dense = torch.optim.SGD(layer.parameters(), 0.01)
    with trace(table, layer, sparse, dense, devices="cpu", stacks=True, table=False) as t:
        for _step in range(8):
            layer(table(torch.randint(0, 5000, (ROWS,)))).square().mean().backward()
            for optimizer in (sparse, dense):
                optimizer.step()
                optimizer.zero_grad()
    return t


@healthy
def a_replay_buffer_that_still_fills(_: Path) -> trace:
    work, replay = Work(), deque[Tensor](maxlen=1000)
    with work.traced() as t:
        for _step in range(12):
            replay.append(torch.randn(64, WIDTH))
            work.learn(torch.stack([each[0] for each in replay]))
    return t


@healthy
def numbers_that_stay_on_the_device(_: Path) -> trace:
    work, losses = Work(), []
    with work.traced() as t:
        for _step in range(12):
            x = torch.randn(32, WIDTH)
            loss = (work.model(x) - x).square().mean()
            loss.backward()
            work.optimizer.step()
            work.optimizer.zero_grad()
            losses.append(loss.detach())
    assert len(losses) == 12
    return t


@healthy
def micro_batches_forward_and_then_backward(_: Path) -> trace:
    """As a pipeline's first stage: it learns the shapes once, and its outputs go to the next stage."""
    work = Work()
    with work.traced() as t:
        work.model(torch.randn(16, WIDTH))
        for _step in range(4):
            outs = [work.model(torch.randn(16, WIDTH)) for _ in range(4)]
            slopes = [torch.ones_like(out) for out in outs]
            for out, slope in zip(outs, slopes, strict=True):
                torch.autograd.backward(out, slope)
            work.optimizer.step()
            work.optimizer.zero_grad()
    return t


@healthy
def features_in_a_hook_for_a_loss(_: Path) -> trace:
    """A perceptual loss: a forward hook keeps features, and the loss reads them."""
    work, features = Work(), dict[str, Tensor]()

    def keep(_module: nn.Module, _given: Any, out: Tensor) -> None:
        features["hidden"] = out

    work.model[1].register_forward_hook(keep)
    with work.traced() as t:
        for _step in range(5):
            x = torch.randn(ROWS, WIDTH)
            out = work.model(x)
            loss = nn.functional.mse_loss(out, x) + features["hidden"].abs().mean()
            loss.backward()
            work.optimizer.step()
            work.optimizer.zero_grad()
    return t


@healthy
def models_of_an_ensemble(_: Path) -> trace:
    torch.manual_seed(0)
    models = []
    with trace(devices="cpu", stacks=True, table=False) as t:
        for _fold in range(4):
            model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH))
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for _step in range(4):
                model(torch.randn(ROWS, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            models.append(model.eval())
        with torch.no_grad():
            torch.stack([model(torch.randn(ROWS, WIDTH)) for model in models]).mean(0)
    return t


@healthy
def steps_that_are_skipped(_: Path) -> trace:
    """Their loss is not finite, and the program lets go of it."""
    work = Work()
    with work.traced() as t:
        for step in range(12):
            loss = work.model(torch.randn(ROWS, WIDTH)).square().mean()
            if step in (4, 9):
                del loss
                continue
            loss.backward()
            work.optimizer.step()
            work.optimizer.zero_grad()
    return t


@healthy
def gradients_of_tasks_with_one_graph(_: Path) -> trace:
    """All backward passes but the last retain it."""
    work = Work()
    with work.traced() as t:
        for _step in range(6):
            out = work.model(torch.randn(ROWS, WIDTH))
            losses = [out[:, i::3].square().mean() for i in range(3)]
            del out
            while losses:
                losses.pop().backward(retain_graph=len(losses) > 0)
            work.optimizer.step()
            work.optimizer.zero_grad()
    return t


@healthy
def layers_that_are_replaced_with_their_optimizer(_: Path) -> trace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH))
    with trace(devices="cpu", stacks=True, table=False) as t:
        for _stage in range(2):
            model[2] = nn.Linear(256, WIDTH)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for _step in range(4):
                model(torch.randn(ROWS, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return t
