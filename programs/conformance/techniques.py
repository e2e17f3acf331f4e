"""The ways people train: each a step to run, and what it changes before the optimizer is made.

A technique says what it adds to the sizes that a plain step has (`Training.masters`, `.averages`,
`.casts`, ...); programs/conformance/expected.py computes with that.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import checkpoint as recompute

from programs.conformance.models import Batch, Recipe, Transformer


class Watch:
    """Told what the program does next. This one does not listen; expected.py has one that does."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The model and its loss."""
        yield

    def given(self, tensors: Iterable[Tensor]) -> None:
        """Made outside, for the model and its loss."""


@dataclass
class Training:
    """A model in training on a device, and what a technique has added to it."""

    recipe: Recipe
    device: str
    model: nn.Module
    optimizer: Any = None
    watch: Watch = field(default_factory=Watch)
    scaler: Any = None
    cast: torch.dtype | None = None  # autocast's
    masters: list[nn.Parameter] = field(default_factory=list)  # fp32 copies of bf16 weights
    average: nn.Module | None = None  # a module that holds averaged weights, or a teacher
    shadow: dict[str, Tensor] = field(default_factory=dict)  # the same in a dictionary
    called: nn.Module | None = None  # what a step calls, where that is not the model itself
    kept: list[Any] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return torch.device(self.device).type

    def batch(self) -> Batch:
        given = self.recipe.batch(self.device)
        dtype = next(self.model.parameters()).dtype
        inputs = (x.to(dtype) if x.is_floating_point() else x for x in given.inputs)
        batch = Batch(tuple(inputs), given.target)
        self.watch.given(batch.tensors())
        return batch

    def loss(self, batch: Batch) -> Tensor:
        """The forward pass."""
        with self.watch.forward(), self.autocast():
            called = self.model if self.called is None else self.called
            output = called(*batch.inputs)
            if self.cast is None:
                output = output.float()
            return self.recipe.loss(output, batch.target)

    def autocast(self) -> Any:
        return torch.autocast(self.kind, self.cast) if self.cast else nullcontext()

    def trained(self) -> list[nn.Parameter]:
        """What the optimizer is given."""
        found = [p for p in self.model.parameters() if p.requires_grad]
        return self.masters or found


Step = Callable[[Training], None]
TECHNIQUES: dict[str, "Technique"] = {}


@dataclass(frozen=True)
class Technique:
    """What to change before training, and a step of it."""

    step: Step
    change: Step
    trains: bool = True
    role: str = ""  # what it makes must be shown to be
    hooks: bool = True  # else the program has saved-tensor hooks of its own: only those count


def technique(name: str, *, change: Step = lambda _: None, **facts: Any) -> Callable[[Step], Step]:
    def add(step: Step) -> Step:
        TECHNIQUES[name] = Technique(step, change, **facts)
        return step

    return add


# -------------------------------------------------------------------------- plain


def plain_step(training: Training) -> None:
    batch = training.batch()
    training.loss(batch).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


technique("fp32")(plain_step)


@technique("keep_gradients")
def zeroed_in_place(training: Training) -> None:
    batch = training.batch()
    training.loss(batch).backward()
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)


@technique("accumulation")
def accumulation(training: Training) -> None:
    batches = [training.batch() for _ in range(3)]
    for batch in batches:
        (training.loss(batch) / 3).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


@technique("clipping")
def clipping(training: Training) -> None:
    batch = training.batch()
    training.loss(batch).backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
    training.optimizer.step()
    training.optimizer.zero_grad()


# -------------------------------------------------------------------------- number formats


def cast_to_bf16(training: Training) -> None:
    training.cast = torch.bfloat16


technique("autocast_bf16", role="autocast_copy", change=cast_to_bf16)(plain_step)


@technique("autocast_bf16_accumulation", role="autocast_copy", change=cast_to_bf16)
def autocast_accumulation(training: Training) -> None:
    accumulation(training)


def cast_to_fp16(training: Training) -> None:
    training.cast = torch.float16
    training.scaler = torch.amp.GradScaler(training.kind, init_scale=2.0**8)


@technique("autocast_fp16", role="autocast_copy", change=cast_to_fp16)
def scaled(training: Training) -> None:
    batch = training.batch()
    training.scaler.scale(training.loss(batch)).backward()
    training.scaler.unscale_(training.optimizer)
    nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.scaler.step(training.optimizer)
    training.scaler.update()
    training.optimizer.zero_grad()


def keep_masters(training: Training) -> None:
    training.masters = [nn.Parameter(p.detach().clone()) for p in training.model.parameters()]
    training.model.bfloat16()


@technique("bf16_masters", role="master", change=keep_masters)
def with_masters(training: Training) -> None:
    batch = training.batch()
    training.loss(batch).backward()
    for master, weight in zip(training.masters, training.model.parameters(), strict=True):
        if weight.grad is not None:
            master.grad = weight.grad.float()
            weight.grad = None
    training.optimizer.step()
    training.optimizer.zero_grad()
    with torch.no_grad():
        for master, weight in zip(training.masters, training.model.parameters(), strict=True):
            weight.copy_(master)


def to_bf16(training: Training) -> None:
    training.model.bfloat16()


technique("bf16", change=to_bf16)(plain_step)


# -------------------------------------------------------------------------- recomputation


class Checkpointed(nn.Module):
    """A layer that is run again in backward. Its inner module keeps its name in the model."""

    def __init__(self, layer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layer = layer
        self.options = options

    def forward(self, *args: Any) -> Any:
        return recompute.checkpoint(self.layer, *args, **self.options)


def checkpointing(**options: Any) -> Step:
    def change(training: Training) -> None:
        chosen = training.recipe.layers(training.model)
        assert chosen, "this model has no layers to checkpoint"
        for module in list(training.model.modules()):
            for name, child in list(module.named_children()):
                if any(child is layer for layer in chosen):
                    setattr(module, name, Checkpointed(child, **options))

    return change


def keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    policy = recompute.CheckpointPolicy
    return policy.MUST_SAVE if op in products else policy.PREFER_RECOMPUTE


technique("checkpoint", role="recomputed", change=checkpointing(use_reentrant=False))(plain_step)
technique("checkpoint_reentrant", role="recomputed", change=checkpointing(use_reentrant=True))(
    plain_step
)
technique(
    "checkpoint_selective",
    role="recomputed",
    change=checkpointing(
        use_reentrant=False,
        context_fn=lambda: recompute.create_selective_checkpoint_contexts(keep_products),
    ),
)(plain_step)


def cast_and_checkpoint(training: Training) -> None:
    cast_to_bf16(training)
    checkpointing(use_reentrant=False)(training)


technique("autocast_checkpoint", role="recomputed", change=cast_and_checkpoint)(plain_step)


@technique("save_on_cpu", hooks=False)
def saved_on_cpu(training: Training) -> None:
    batch = training.batch()
    with torch.autograd.graph.save_on_cpu():
        loss = training.loss(batch)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


# -------------------------------------------------------------------------- which weights


class Adapter(nn.Module):
    """A frozen linear layer and a low-rank one beside it, as LoRA has them."""

    def __init__(self, linear: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.frozen = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) + self.up(self.down(x))
        return y


def adapt(training: Training) -> None:
    training.model.requires_grad_(False)
    for layer in training.recipe.layers(training.model):
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Adapter(child).to(training.device))


def adapt_and_cast(training: Training) -> None:
    adapt(training)
    cast_to_bf16(training)


def adapt_and_recompute(training: Training) -> None:
    adapt(training)
    checkpointing(use_reentrant=False)(training)


technique("lora", change=adapt)(plain_step)
technique("lora_checkpoint", role="recomputed", change=adapt_and_recompute)(plain_step)
technique("lora_autocast", role="autocast_copy", change=adapt_and_cast)(plain_step)


def with_a_teacher(training: Training) -> None:
    training.average = copy.deepcopy(training.model).requires_grad_(False)


@technique("distillation", role="target", change=with_a_teacher)
def distilled(training: Training) -> None:
    batch = training.batch()
    assert training.average is not None
    with torch.no_grad():
        wanted = training.average(*batch.inputs)
    training.watch.given([wanted])
    with training.watch.forward():
        loss = nn.functional.mse_loss(training.model(*batch.inputs), wanted)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def average_in_module(training: Training) -> None:
    average = get_ema_multi_avg_fn(0.9)
    training.average = AveragedModel(training.model, multi_avg_fn=average)


@technique("ema_module", change=average_in_module)
def averaged(training: Training) -> None:
    plain_step(training)
    assert isinstance(training.average, AveragedModel)
    training.average.update_parameters(training.model)


def average_in_dictionary(training: Training) -> None:
    training.shadow = {k: p.detach().clone() for k, p in training.model.named_parameters()}


@technique("ema_dictionary", change=average_in_dictionary)
def averaged_in_dictionary(training: Training) -> None:
    plain_step(training)
    with torch.no_grad():
        for name, parameter in training.model.named_parameters():
            training.shadow[name].lerp_(parameter, 0.1)


# -------------------------------------------------------------------------- torch.compile


def compiling(backend: str) -> Step:
    def change(training: Training) -> None:
        training.called = torch.compile(training.model, backend=backend)  # type: ignore[assignment]

    return change


technique("compile_aot", change=compiling("aot_eager"))(plain_step)
technique("compile_inductor", change=compiling("inductor"))(plain_step)


# -------------------------------------------------------------------------- graphs


@technique("retained_graph")
def retained(training: Training) -> None:
    batch = training.batch()
    loss = training.loss(batch)
    loss.backward(retain_graph=True)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


@technique("double_backward")
def gradient_penalty(training: Training) -> None:
    batch = training.batch()
    x = batch.inputs[0].requires_grad_()
    loss = training.loss(batch)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    with training.watch.forward():
        total = loss + slope.square().sum()
    del loss, slope, x
    total.backward(inputs=list(training.model.parameters()))
    training.optimizer.step()
    training.optimizer.zero_grad()


# -------------------------------------------------------------------------- without training


@technique("evaluation_inside")
def evaluation(training: Training) -> None:
    plain_step(training)
    training.model.eval()
    for _ in range(2):
        evaluate(training)
    training.model.train()


@torch.no_grad()
def evaluate(training: Training) -> None:
    batch = training.batch()
    training.loss(batch)


@technique("inference", trains=False)
def inference(training: Training) -> None:
    training.model.eval()
    with torch.inference_mode():
        batch = training.batch()
        for _ in range(2):
            training.model(*batch.inputs)


@technique("autocast_inference", role="autocast_copy", trains=False, change=cast_to_bf16)
def autocast_inference(training: Training) -> None:
    with training.autocast():
        inference(training)


def a_prompt(training: Training) -> Tensor:
    """Half of what fits, so that there is room for words to come."""
    ids = training.batch().inputs[0]
    return ids[:, : ids.shape[1] // 2]


@technique("generation", role="kv_cache", trains=False)
@torch.no_grad()
def generation(training: Training) -> None:
    """The cache goes from call to call."""
    prompt = a_prompt(training)
    ids, cache = prompt, None
    for _ in range(6):
        logits, cache = training.model(ids, past_key_values=cache, use_cache=True)
        ids = logits[:, -1:].argmax(-1)
    training.kept = [cache]


@technique("beam_search", role="kv_cache", trains=False)
@torch.no_grad()
def beam_search(training: Training, beams: int = 3) -> None:
    """The cache is put in the order of the beams that survive."""
    model = training.model
    assert isinstance(model, Transformer)
    prompt = a_prompt(training)[:1]
    ids, cache = prompt.expand(beams, -1).contiguous(), None
    score = torch.zeros(beams, 1, device=training.device)
    for _ in range(6):
        logits, cache = model(ids, past_key_values=cache, use_cache=True)
        total = score + logits[:, -1].log_softmax(-1)
        score, best = total.flatten().topk(beams)
        score, beam = score[:, None], best // logits.shape[-1]
        ids = (best % logits.shape[-1])[:, None]
        cache = [(k[beam], v[beam]) for k, v in cache]
    training.kept = [cache]
