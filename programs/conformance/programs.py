"""Small programs that say, while they run, what their own tensors are; each is held to it in every mode.

The oracle is Python itself, at that instant: this is a parameter's `.grad`, that is in
`optimizer.state`, this was made for the loss. A word is a category, or a category and a role. Where a
program shows all of a category at once, the trace must have its bytes and no more.
"""

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from programs.conformance.expected import position, storages
from pytracer import trace
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.grouping import role_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORIES, CATEGORY

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "hooks": {"saved_tensors": "hooks"},
    "category": {"detail": "category"},
    "category, hooks": {"detail": "category", "saved_tensors": "hooks"},
}


@dataclass
class Says:
    """Collects what the program says; it traces itself, for much is there before it does."""

    mode: str
    device: str
    told: list[tuple[str, int, int, str]] = field(default_factory=list)
    totals: list[tuple[int, str, int]] = field(default_factory=list)  # event, category, bytes
    data: Trace | None = None

    @contextmanager
    def traced(self, *targets: Any) -> Iterator[None]:
        with trace(*targets, devices=self.device, table=False, **MODES[self.mode]) as t:
            yield
        self.data = t.data

    def are(self, word: str, *tensors: Tensor | None, name: str = "") -> None:
        """These are that, now: one tensor, one block."""
        for number, tensor in enumerate(tensors):
            # What lies elsewhere, as a fused optimizer's counters may, is not recorded.
            if tensor is not None and tensor.device.type == self.device:
                where = position(), tensor.untyped_storage().data_ptr()
                self.told.append((f"{name or word} {number}", *where, word))

    def only(self, category: str, tensors: Iterable[Tensor]) -> None:
        """These are all there is of that, now."""
        here = [tensor for tensor in tensors if tensor.device.type == self.device]
        self.totals.append((position(), category, storages(here)))

    def look(self, *parts: Any) -> None:
        """At what Python shows of all models and optimizers: they have that, and nothing else is so."""
        models = [part for part in parts if isinstance(part, nn.Module)]
        parameters = list({p: None for model in models for p in model.parameters()})
        buffers = [buffer for model in models for buffer in model.buffers()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        self.are("weights/parameter", *parameters)
        self.are("weights/buffer", *buffers)
        self.are("gradients", *gradients)
        self.only("weights", [*parameters, *buffers])
        self.only("gradients", gradients)
        states = [part.state for part in parts if not isinstance(part, nn.Module)]
        by_key = [(k, v) for s in states for one in s.values() for k, v in one.items()]
        found = [(key, t) for key, v in by_key for t in tree_leaves(v) if isinstance(t, Tensor)]
        for key, tensor in found:
            self.are(f"optimizer_state/{key}", tensor)
        self.only("optimizer_state", [tensor for _, tensor in found])

    def saves(self, loss: Tensor, *known: Any) -> None:
        """What autograd has saved for this loss is an activation, unless it is known as something else."""
        tensors = [t for part in known for t in leaves(part)]
        places = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for tensor in saved(loss):
            # Torch shows no hook the numbers in a formula, as `3 * x` has one.
            number = tensor.dim() == 0 and "hooks" in self.mode
            if tensor.untyped_storage().data_ptr() not in places and not number:
                self.are("activations", tensor)

    def wrong(self) -> list[str]:
        """What the trace says otherwise."""
        assert self.data is not None
        found, lines = allocations(self.data), []
        end = np.where(found.end < 0, np.iinfo(found.end.dtype).max, found.end)
        for name, at, address, word in self.told:
            there = (found.address == address) & (found.start < at) & (end >= at)
            says = {
                (CATEGORIES[found.category[i]], role_text(self.data, int(found.role[i])))
                for i in np.flatnonzero(there)
            }
            category, _, role = word.partition("/")
            good = any(c == category and (not role or r == role) for c, r in says)
            if not good or len(says) != 1:
                lines.append(
                    f"{name} at event {at} is {word}, and is said to be {says or 'nothing'}"
                )
        for (at, category, shown), total in zip(self.totals, self.said(), strict=True):
            if total != shown:
                lines.append(f"{shown} bytes of {category} at event {at}, said to be {total}")
        return lines

    def said(self) -> list[int]:
        """Bytes of a category, where the program showed all there is of it."""
        assert self.data is not None
        found = allocations(self.data)
        end = np.where(found.end < 0, np.iinfo(found.end.dtype).max, found.end)
        sums = []
        for at, category, _ in self.totals:
            there = (found.start < at) & (end >= at) & (found.category == CATEGORY[category])
            sums.append(int(found.requested_bytes[there].sum()))
        return sums


def leaves(part: Any) -> list[Tensor]:
    """The tensors of a model, or of anything that torch's trees go into."""
    if isinstance(part, nn.Module):
        return [*part.parameters(), *part.buffers()]
    return [leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)]


def saved(loss: Tensor) -> Iterator[Tensor]:
    """Each tensor that autograd has saved for the backward of this loss, as it is."""
    left, seen = [loss.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                value = getattr(node, name)
                for one in value if isinstance(value, tuple | list) else [value]:
                    tensor = getattr(one, "data", None)
                    if isinstance(tensor, Tensor):
                        yield tensor


Program = Callable[[Says], None]
PROGRAMS: dict[str, Program] = {}
ON_A_GPU: set[str] = set()  # those that need one
ON_THE_CPU = {"products_are_of_eight_bits"}  # only there, where float8 is emulated

# What is found in a program, and truly so: it keeps each step's tensors in a list, or a variable
# lives through backward. In all others nothing is found.
KEPT = {
    "what_is_made_like_a_target_and_kept_unused": {"growth"},
    "a_validation_whose_outputs_are_kept": {"growth"},
    "two_views_beside_the_rest_of_the_batch": {"held"},
    "a_queue_of_keys_and_a_slow_encoder": {"held"},
    "hard_triplets_are_looked_for": {"held"},
}


def program(run: Program) -> Program:
    PROGRAMS[run.__name__] = run
    return run


def run(name: str, mode: str, device: str = "cpu") -> Says:
    if device == "cuda":
        gc.collect()  # models of a program before this one are no weights of it
    torch.manual_seed(0)
    says = Says(mode, device)
    with torch.device(device):
        PROGRAMS[name](says)
    return says


def a_model(width: int = 64, out: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 96), nn.Tanh(), nn.Linear(96, out))


# -------------------------------------------------------------------------- targets of the loss


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": lambda out, y: (out - y).abs().mean(),
    "squared": lambda out, y: (out - y).pow(2).mean(),
    "huber": lambda out, y: torch.where(
        (out - y).abs() < 1, 0.5 * (out - y) ** 2, (out - y).abs() - 0.5
    ).mean(),
    "charbonnier": lambda out, y: ((out - y).square() + 1e-6).sqrt().mean(),
    "sum_of_two": lambda out, y: (out + y).tanh().mean(),
    "concatenated": lambda out, y: torch.cat([out, y]).square().mean(),
    "stacked": lambda out, y: torch.stack([out, y]).var(),
    "log_cosh": lambda out, y: torch.log(torch.cosh(out - y)).mean(),
    "quantile": lambda out, y: torch.max(0.9 * (y - out), -0.1 * (y - out)).mean(),
    "product": lambda out, y: -(out.softmax(-1) * y).sum(),
    "functional": lambda out, y: nn.functional.smooth_l1_loss(out, y),
    "lerp": lambda out, y: torch.lerp(out, y, 0.3).square().mean(),
    "in_place": lambda out, y: out.clone().sub_(y).abs().mean(),
    "of_a_view": lambda out, y: (out[:, ::2] - y[:, ::2]).abs().mean(),
    "distance": lambda out, y: torch.dist(out, y),
    "under_maximum": lambda out, y: torch.maximum(out, y).mean(),
}


def training_with(loss: Callable[[Tensor, Tensor], Tensor]) -> Program:
    def run(says: Says) -> None:
        model = a_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with says.traced(model, optimizer):
            for _ in range(5):
                x, y = torch.randn(33, 64), torch.randn(33, 64)
                says.are("inputs/batch", x)
                says.are("inputs/target", y)
                loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    return run


for _name, _loss in LOSSES.items():
    PROGRAMS[f"a_target_of_{_name}"] = training_with(_loss)


@program
def a_target_from_before_the_trace(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(33, 64), torch.randn(33, 64)
    with says.traced(model, optimizer):
        for _ in range(4):
            loss = (model(x) - y).abs().mean()
            says.are("inputs/batch", x)
            says.are("inputs/target", y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@program
def a_target_of_lbfgs_from_before(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3)
    x, y = torch.randn(33, 64), torch.randn(33, 64)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).abs().mean()
        says.are("inputs/target", y)
        loss.backward()
        return loss

    with says.traced(model, optimizer):
        for _ in range(2):
            optimizer.step(closure)


@program
def targets_that_are_cast_in_the_loss(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with says.traced(model, optimizer):
        for _ in range(4):
            x, y = torch.randn(33, 64), torch.randint(0, 9, (33, 64))
            says.are("inputs/raw", y)
            (model(x) - y.float()).abs().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@program
def advantages_of_a_policy(says: Says) -> None:
    policy, critic = a_model(16, 4), a_model(16, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()])
    with says.traced(policy, critic, optimizer):
        for _ in range(4):
            seen, returns = torch.randn(77, 16), torch.randn(77)
            with torch.no_grad():
                advantages = returns - critic(seen).squeeze(-1)
            says.are("inputs/target", advantages, returns)
            log = policy(seen).log_softmax(-1)[:, 0]
            loss = -(log * advantages).mean() + (critic(seen).squeeze(-1) - returns).abs().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@program
def a_teachers_soft_targets(says: Says) -> None:
    teacher, model = nn.Linear(16, 100).eval(), nn.Linear(16, 100)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with says.traced(teacher, model, optimizer):
        for _ in range(4):
            x = torch.randn(40, 16)
            with torch.no_grad():
                soft = teacher(x).softmax(-1)
            says.are("inputs/batch", x)
            says.are("inputs/target", soft)
            nn.functional.kl_div(model(x).log_softmax(-1), soft, reduction="batchmean").backward()
            optimizer.step()
            optimizer.zero_grad()


@program
def what_is_made_like_a_target_and_kept_unused(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    kept = []
    with says.traced(model, optimizer):
        for _ in range(20):
            x, y, unused = (torch.randn(33, 64) for _ in range(3))
            kept.append(unused)
            says.are("inputs/target", y)
            says.are("functional", unused)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


@program
def a_validation_whose_outputs_are_kept(says: Says) -> None:
    model = nn.Linear(64, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = []
    with says.traced(model, optimizer):
        for _ in range(4):
            x, y = torch.randn(50, 64), torch.randint(0, 16, (50,))
            says.are("inputs/batch", x)
            says.are("inputs/target", y)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                kept.append(model(torch.randn(30, 64)))
            says.are("functional/output", kept[-1])


@program
def losses_are_summed_with_their_graphs(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with says.traced(model, optimizer):
        total = torch.zeros(())
        for _ in range(4):
            x, y = torch.randn(33, 64), torch.randn(33, 64)
            loss = (model(x) - y).abs().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = total + loss  # no backward follows: what comes next is another step's
            says.are("inputs/batch", x)
            says.are("inputs/target", y)


@program
def a_search_among_what_a_model_says(says: Says) -> None:
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50))
    with says.traced(model), torch.no_grad():
        score, words = torch.zeros(4, 1), torch.zeros(4, 1, dtype=torch.long)
        for _ in range(5):
            says.are("inputs/batch", words)
            total = score + model(words)[:, -1].log_softmax(-1)
            best_score, best = total.flatten().topk(4)
            says.are("functional", score)
            score, words = best_score[:, None], (best % 50)[:, None]


@program
def batches_of_an_accumulation_wait_for_their_turn(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with says.traced(model, optimizer):
        for _ in range(3):
            batches = [(torch.randn(33, 64), torch.randn(33, 64)) for _ in range(3)]
            for x, y in batches:
                says.are("inputs/batch", x)
                says.are("inputs/target", y)
                (model(x) - y).abs().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


# -------------------------------------------------------------------------- what batches are made of


@program
def raw_images_are_normalised(says: Says) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 3, 12, 12))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with says.traced(model, optimizer):
        for _ in range(4):
            raw = torch.randint(0, 255, (20, 3, 12, 12), dtype=torch.uint8)
            x, y = raw.float().div(255).sub(0.5), torch.randint(0, 10, (20,))
            says.are("inputs/raw", raw)
            says.are("inputs/batch", x)
            says.are("inputs/target", y)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


@program
def a_diffusion_step(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(4):
            x0, noise, level = torch.randn(33, 64), torch.randn(33, 64), torch.rand(33, 1)
            noisy = x0 * (1 - level) + noise * level
            says.are("inputs/raw", x0)
            says.are("inputs/batch", noisy)
            says.are("inputs/target", noise)
            (model(noisy) - noise).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@program
def a_data_set_on_the_device(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with says.traced(model, optimizer):
        data = torch.randn(500, 64)
        for _ in range(4):
            x = data[torch.randint(0, 500, (33,))]
            says.are("functional", data)
            says.are("inputs/batch", x)
            (model(x) - x).abs().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


# -------------------------------------------------------------------------- gradients


@program
def gradients_that_a_hook_steps_with_and_drops(says: Says) -> None:
    model = a_model()

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        says.are("gradients", parameter.grad)
        with torch.no_grad():
            parameter -= 0.01 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with says.traced(model):
        for _ in range(3):
            model(torch.randn(33, 64)).square().mean().backward()


@program
def an_optimizer_in_backward(says: Says) -> None:
    model = a_model()
    optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        says.are("gradients", parameter.grad)
        optimizers[parameter].step()
        says.are("optimizer_state/exp_avg", optimizers[parameter].state[parameter]["exp_avg"])
        optimizers[parameter].zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    with says.traced(model, *optimizers.values()):
        for _ in range(3):
            model(torch.randn(33, 64)).square().mean().backward()
    for hook in hooks:  # Python never collects a parameter that its own hook holds
        hook.remove()


@program
def gradients_are_moved_away_one_by_one(says: Says) -> None:
    model = a_model()
    away: list[Tensor] = []

    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        says.are("gradients", parameter.grad)
        away.append(parameter.grad.to(torch.float64))
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(move)
    with says.traced(model):
        for _ in range(3):
            model(torch.randn(33, 64)).square().mean().backward()


# -------------------------------------------------------------------------- what stands in for weights


@program
def fast_weights_of_an_inner_loop(says: Says) -> None:
    model = nn.Linear(48, 48, bias=False)
    with says.traced(model):
        for _ in range(3):
            x = torch.randn(8, 48)
            fast = dict(model.named_parameters())
            says.are("weights/parameter", fast["weight"])
            for _ in range(3):
                loss = functional_call(model, fast, (x,)).square().mean()
                slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {"weight": fast["weight"] - 0.1 * slopes[0]}
            loss = functional_call(model, fast, (x,)).square().mean()
            says.are("activations", fast["weight"])
            loss.backward()
            model.zero_grad()


@program
def weights_that_another_network_makes(says: Says) -> None:
    model, maker = nn.Linear(32, 32), nn.Linear(8, 32 * 33)
    optimizer = torch.optim.SGD(maker.parameters(), 0.1)
    with says.traced(model, maker, optimizer):
        for _ in range(3):
            made = maker(torch.randn(8))
            weights = {"weight": made[: 32 * 32].view(32, 32), "bias": made[32 * 32 :]}
            out = functional_call(model, weights, (torch.randn(16, 32),))
            says.are("activations", made)
            says.are("weights/parameter", model.weight, maker.weight)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@program
def an_average_of_weights_is_evaluated(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with says.traced(model, optimizer):
        average = {k: p.detach().clone() for k, p in model.named_parameters()}
        for _ in range(3):
            x = torch.randn(33, 64)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    average[name].lerp_(parameter, 0.1)
                functional_call(model, average, (x,))
            says.are("functional", *average.values())


# -------------------------------------------------------------------------- other ways to train


@program
def the_engine_itself_is_called(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.Adam(model.parameters())
    engine = torch.autograd.Variable._execution_engine
    with says.traced(model, optimizer):
        for _ in range(4):
            x, y = torch.randn(33, 64), torch.randn(33, 64)
            says.are("inputs/batch", x)
            says.are("inputs/target", y)
            loss = (model(x) - y).abs().mean()
            engine.run_backward((loss,), (torch.ones(()),), False, False, (), True, True)
            says.are("gradients", *(p.grad for p in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()


@program
def gradients_by_a_transform(says: Says) -> None:
    model = a_model()
    with says.traced(model):
        for _ in range(4):
            x, y = torch.randn(33, 64), torch.randn(33, 64)
            weights = dict(model.named_parameters())
            says.are("weights/parameter", *weights.values())
            says.are("inputs/batch", x)

            def loss(weights: dict[str, Tensor], x: Tensor = x, y: Tensor = y) -> Tensor:
                return (functional_call(model, weights, (x,)) - y).abs().mean()

            slopes = torch.func.grad(loss)(weights)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter -= 0.01 * slopes[name]


@program
def an_exported_program_is_trained(says: Says) -> None:
    model = torch.export.export(a_model(), (torch.randn(33, 64),)).module()
    optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(4):
            x, y = torch.randn(33, 64), torch.randn(33, 64)
            says.are("inputs/batch", x)
            says.are("inputs/target", y)
            (model(x) - y).abs().mean().backward()
            says.are("weights/parameter", *model.parameters())
            says.are("gradients", *(p.grad for p in model.parameters()))
            optimizer.step()
            for state in optimizer.state.values():
                says.are("optimizer_state/exp_avg", state["exp_avg"])
            optimizer.zero_grad()


@program
def activations_are_offloaded(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.Adam(model.parameters())
    away: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        away.append(tensor.to(torch.float64))  # as to another device
        return away[-1]

    with says.traced(model, optimizer):
        for _ in range(4):
            x, y = torch.randn(33, 64), torch.randn(33, 64)
            says.are("inputs/batch", x)
            says.are("inputs/target", y)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.float()):
                loss = (model(x) - y).abs().mean()
            says.are("activations", *away)
            loss.backward()
            away.clear()
            says.are("gradients", *(p.grad for p in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()


@program
def two_models_are_trained_by_two_threads(says: Says) -> None:
    models = [a_model(), a_model()]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            x = torch.randn(33, 64, device=says.device)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    with says.traced(*models, *optimizers):
        threads = [
            threading.Thread(target=train, args=pair)
            for pair in zip(models, optimizers, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for model, optimizer in zip(models, optimizers, strict=True):
            says.are("weights/parameter", *model.parameters())
            for state in optimizer.state.values():
                says.are("optimizer_state/exp_avg", state["exp_avg"])


# -------------------------------------------------------------------------- state and tables


@program
def history_that_comes_and_goes_within_a_step(says: Says) -> None:
    model = nn.Linear(32, 32, bias=False)
    optimizer = torch.optim.LBFGS(
        model.parameters(), 0.1, max_iter=12, history_size=3, tolerance_grad=0, tolerance_change=0
    )
    x, y = torch.randn(40, 32), torch.randn(40, 32)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).pow(4).mean()
        loss.backward()
        state = optimizer.state[model.weight]
        for name in ("old_dirs", "old_stps"):
            says.are(f"optimizer_state/{name}", *(state.get(name) or ()))
        return loss

    with says.traced(model, optimizer):
        for _ in range(3):
            optimizer.step(closure)


class WithTable(nn.Module):
    """Makes a table once, as rotary embeddings do, and keeps it as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.table: Tensor | None = None
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(256.0)[:, None] * torch.ones(16)
        y: Tensor = self.linear(x)
        self.last = y.detach().clone()
        return y * self.table[: len(x)]


@program
def a_table_that_the_first_forward_makes(says: Says) -> None:
    model = WithTable()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with says.traced(model, optimizer):
        for _ in range(4):
            model(torch.randn(20, 16)).square().mean().backward()
            says.are("weights/buffer", model.table)
            says.are("activations/held", model.last)
            optimizer.step()
            optimizer.zero_grad()
