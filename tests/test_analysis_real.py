"""Categories of real training steps on the CPU, against sizes computed from the tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytracer import trace
from pytracer.analysis.answers import breakdown, training_steps
from pytracer.analysis.facts import usage

BATCH, LENGTH, WIDTH, WORDS = 4, 16, 32, 100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("scale", torch.ones(7))
        self.reentrant = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def loss_of(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH))
    wanted = torch.randint(0, WORDS, (BATCH, LENGTH))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())


def train(
    model: nn.Module, optimizer: Any, steps: int = 2, micro_steps: int = 1, **cast: Any
) -> None:
    for _ in range(steps):
        for _ in range(micro_steps):
            with torch.autocast("cpu", torch.bfloat16, **(cast or {"enabled": False})):
                loss = loss_of(model)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def bytes_of(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def peaks(recorded: Any) -> dict[str, int]:
    """Each category's own peak, of those that are not 0."""
    rows = breakdown.category_rows(recorded.data)
    return {row.category: row.own_peak for row in rows if row.own_peak}


OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), 0),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
    "adamw": (lambda p: torch.optim.AdamW(p), 2),
    "adamw for-loop": (lambda p: torch.optim.AdamW(p, foreach=False), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_what_can_be_computed_is_exact(name: str, micro_steps: int) -> None:
    make, states = OPTIMIZERS[name]
    model = Model()
    optimizer = make(model.parameters())
    with trace(model, optimizer) as t:
        train(model, optimizer, micro_steps=micro_steps)
    parameters = bytes_of(model.parameters())
    found = peaks(t)
    assert found["weights"] == parameters + bytes_of(model.buffers())
    assert found["gradients"] == parameters
    steps = 4 * len(list(model.parameters())) if states == 2 else 0  # Adam counts per tensor
    assert found.get("optimizer_state", 0) == states * parameters + steps
    assert "unknown" not in found
    assert [row.micro_steps for row in training_steps.step_rows(t.data)] == [micro_steps] * 2


@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_saved_tensors_inferred_are_those_that_hooks_see(checkpointed: bool | None) -> None:
    activations = {}
    for how in ("auto", "hooks"):
        model = Model(checkpointed)
        optimizer = torch.optim.AdamW(model.parameters())
        with trace(model, optimizer, saved_tensors=how) as t:
            train(model, optimizer)
        activations[how] = usage.peak(t.data).by_category["activations"]
    assert activations["auto"] == activations["hooks"] > 0


def test_autocast_adds_a_copy_of_each_weight_it_casts() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    with trace(model, optimizer) as t:
        train(model, optimizer, enabled=True)
    frame = t.allocations()
    copies = frame[(frame.role == "autocast_copy") & (frame.step == 1)]
    cast = [n for n, _ in model.named_parameters() if "norm" not in n and "words" not in n]
    assert sorted(copies.name) == sorted(cast)
    named = dict(model.named_parameters())
    sizes = {n: 2 * named[n].numel() for n in cast}
    assert dict(zip(copies.name, copies.requested_bytes, strict=True)) == sizes


def test_generation_keeps_what_the_program_keeps() -> None:
    model = Model()
    with trace(model) as t, torch.no_grad():
        kept = [model(torch.randint(0, WORDS, (1, LENGTH))) for _ in range(3)]
    found = t.summary()
    assert found.loc["functional", "at_end"] == bytes_of(kept)
    assert found.loc["activations", "own_peak"] == 0


def test_a_forward_alone_with_grad_mode_keeps_its_activations() -> None:
    model = Model()
    with trace(model) as t:
        output = model(torch.randint(0, WORDS, (BATCH, LENGTH)))
    assert t.summary().loc["activations", "at_end"] > bytes_of([output])


def test_detail_category_finds_the_same_categories() -> None:
    by_category = []
    for detail in ("op", "category"):
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        with trace(model, optimizer, detail=detail) as t:
            train(model, optimizer)
        by_category.append(usage.peak(t.data).by_category)
    assert by_category[0] == by_category[1]


@pytest.mark.parametrize("detail", ["op", "category"])
def test_categories_sum_to_the_total_at_every_event(detail: str) -> None:
    model = Model(checkpointed=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with trace(model, optimizer, detail=detail) as t:
        train(model, optimizer)
    total = t.timeline(by="device").sum(axis=1)
    assert (t.timeline(by="category").sum(axis=1) == total).all()
    assert (t.timeline(by="phase").sum(axis=1) == total).all()


class Cached(nn.Module):
    """Keeps what it saw, as attention does with keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> Any:
        key = self.key(x)
        return key if past_key_values is None else torch.cat([past_key_values, key], 1)


class CacheObject:
    """A cache as transformers has them: an object with a list of layers."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.layers = [type("Layer", (), {})()]
        self.layers[0].keys = keys


@pytest.mark.parametrize("how", ["keyword", "position", "list", "object"])
def test_what_is_handed_over_as_past_is_a_kv_cache(how: str) -> None:
    class Outer(Cached):
        def forward(self, x: torch.Tensor, past_key_values: Any = None) -> Any:
            if how == "list" and past_key_values is not None:
                past_key_values = past_key_values[0][0]
            if how == "object" and past_key_values is not None:
                past_key_values = past_key_values.layers[0].keys
            return super().forward(x, past_key_values)

    model = Outer()
    with trace(model) as t, torch.no_grad():
        x = torch.randn(1, 4, WIDTH)
        cache = model(x)
        given = {"list": [(cache,)], "object": CacheObject(cache)}.get(how, cache)
        if how == "keyword":
            model(x, past_key_values=given)
        else:
            model(x, given)
    frame = t.allocations().set_index("address")
    assert frame.loc[cache.data_ptr(), "category"] == "functional"
    assert frame.loc[cache.data_ptr(), "role"] == "kv_cache"
    assert frame.loc[x.data_ptr(), "role"] == "batch"


def test_float32_weights_that_only_the_optimizer_has_are_masters_of_16_bit_ones() -> None:
    model = nn.Linear(WIDTH, WIDTH).bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.SGD(masters)
    with trace(model, optimizer) as t:
        model(torch.randn(2, WIDTH).bfloat16()).sum().backward()
    weights = t.allocations().query("category == 'weights'")
    sizes = weights.groupby("role", observed=True).requested_bytes.sum()
    assert sizes["master"] == bytes_of(masters)
    assert sizes["parameter"] == bytes_of(model.parameters())
    assert t.bytes_per_parameter().per_parameter["weights"] == 6.0


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_makes_again_is_held_by_the_module_that_makes_it(
    reentrant: bool,
) -> None:
    model = Model(checkpointed=reentrant)
    with trace(model, table=False, stacks=True) as t:
        loss_of(model).backward()
    frame = t.allocations()
    again = frame[(frame.phase == "recompute") & (frame.category == "activations")]
    inside = again[again.module.str.startswith("blocks.", na=False)]
    assert len(inside) > 10
    assert inside.line.notna().all()
    # The first of each block, while all of it is there.
    at = int(inside.start_ns.max())
    for key in ("module", "op", "line"):
        alive = inside[(inside.start_ns <= at) & (inside.end_ns.fillna(at + 1) > at)]
        own = alive.groupby(key, observed=True).requested_bytes.sum().to_dict()
        held = t.by(["phase", "category", key], at=at).reset_index()
        held = held[(held.phase == "recompute") & (held.category == "activations")]
        found = dict(zip(held[key], held.bytes, strict=True))
        assert {name: found.get(name) for name in own} == own


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_trace_inside_a_trace_knows_what_was_there_before_it(given: bool, device: str) -> None:
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    targets = (model, optimizer) if given else ()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randint(0, WORDS, (BATCH, LENGTH), device=device)).square().mean().backward()
        optimizer.step()

    step()
    with trace(*targets, devices=device, table=False) as outer:
        step()
        with trace(*targets, devices=device, table=False) as inner:
            step()
    with trace(*targets, devices=device, table=False) as alone:
        step()
    held = ["weights", "gradients", "optimizer_state"]
    weights = bytes_of([*model.parameters(), *model.buffers()])
    for t in (inner, outer, alone):
        assert t.summary().own_peak["weights"] == weights
        assert t.summary().own_peak["unknown"] == 0
    assert inner.summary().own_peak[held].equals(alone.summary().own_peak[held])
    assert inner.peak.by_category == alone.peak.by_category


def test_gradients_from_before_a_trace_are_known_though_it_begins_by_freeing_them() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    loss_of(model).backward()
    with trace(model, optimizer, table=False) as t:
        optimizer.zero_grad()
        loss_of(model).backward()
    own_peak = t.summary().own_peak
    assert own_peak["gradients"] == bytes_of(model.parameters())
    assert own_peak["unknown"] == 0


@pytest.mark.parametrize("stacked", [False, True], ids=["one optimizer", "two"])
def test_a_parameter_has_its_modules_name_though_its_optimizer_is_met_first(stacked: bool) -> None:
    """As Lightning does: the optimizer's step calls the model; and zero_grad frees what was."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=False))
    parts = [model[0], model[1]] if stacked else [model]
    optimizers = [torch.optim.AdamW(part.parameters()) for part in parts]

    def closure() -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(torch.randn(2, 8)).square().sum()
        loss.backward()
        return loss

    model(torch.randn(2, 8)).sum().backward()
    with trace(table=False) as t:
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.step()  # of gradients that are older than the trace
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.step(closure)  # type: ignore[arg-type]
    rows = t.allocations()
    named = {name: p.numel() * 4 for name, p in model.named_parameters()}
    for category, role in (
        ("weights", "parameter"),
        ("gradients", "parameter"),
        ("optimizer_state", "exp_avg"),
        ("optimizer_state", "exp_avg_sq"),
    ):
        those = rows[(rows.category == category) & (rows.role == role)]
        assert dict(zip(those.name, those.requested_bytes, strict=True)) == named
        assert those.name.notna().all()
    assert set(rows.name.dropna()) == set(named)
    assert not (rows.role == "bucket").any()
    assert "param_groups" not in str(t)
    assert "foreign_parameters" not in t.health().index


def test_models_of_one_class_do_not_share_names() -> None:
    """An actor, a critic and a copy; one that is made anew in each step has one name."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.body(x))

    first, second = Net(), Net()
    x = torch.randn(4, 8)
    with trace(devices="cpu", table=False) as t:
        for _ in range(3):
            (first(x).sum() + second(x).sum() + Net()(x).sum()).backward()
    rows = t.allocations()
    names = rows[rows.category == "weights"].name.dropna().unique()
    models = ("Net.", "Net#2.", "Net#3.")
    assert {*names} == {f"{model}body.{part}" for model in models for part in ("weight", "bias")}
    assert {"Net", "Net#2", "Net#3"} <= {*rows.module.dropna()}


def test_two_optimizers_of_plain_tensors_do_not_share_names() -> None:
    tensors = [torch.randn(size, requires_grad=True) for size in (10, 20)]
    optimizers = [torch.optim.SGD([tensor]) for tensor in tensors]
    with trace(table=False) as t:
        for tensor, optimizer in zip(tensors, optimizers, strict=True):
            tensor.sum().backward()
            optimizer.step()
    rows = t.allocations()
    weights = rows[rows.category == "weights"]
    assert dict(zip(weights.name, weights.requested_bytes, strict=True)) == {
        "param_groups[0].params[0]": 40,
        "optimizers[1].param_groups[0].params[0]": 80,
    }
    assert t.bytes_per_parameter().per_parameter["weights"] == 4.0


def test_what_deepspeeds_optimizers_hold_is_what_it_is() -> None:
    """Made before the trace, and known to its engine alone; tests/test_distributed.py runs it."""

    class Bucket:
        def __init__(self) -> None:
            self.buffer = [torch.zeros(10)]

    class Zero:
        __module__ = "deepspeed.runtime.zero.stage3"

        def __init__(self) -> None:
            self.fp16_partitioned_groups_flat = [torch.zeros(20)]
            self.fp32_partitioned_groups_flat = [torch.zeros(30, requires_grad=True)]
            self.fp32_partitioned_groups_flat[0].grad = torch.zeros(30)
            self.averaged_gradients = {0: [torch.zeros(40)]}
            self.ipg_buckets = {torch.float32: Bucket()}
            self.other = torch.zeros(1000)

    engine = nn.Sequential(nn.Linear(5, 5, bias=False))
    engine.__dict__["optimizer"] = Zero()
    with trace(table=False, devices="cpu") as t:
        engine(torch.ones(2, 5)).sum().backward()
    rows = t.allocations()
    known = rows[
        (rows.phase.isna()) & rows.category.isin(["weights", "gradients", "communication"])
    ]
    assert sorted(zip(known.category, known.role, known.requested_bytes, strict=True)) == [
        ("communication", "bucket", 40),
        ("gradients", "master", 120),
        ("gradients", "parameter", 160),
        ("weights", "master", 120),
        ("weights", "parameter", 80),
        ("weights", "parameter", 100),
    ]


@pytest.mark.cuda
def test_what_the_program_has_on_the_gpu_from_before_the_trace_is_known() -> None:
    """An average of the weights in a dictionary, data that lies on the device."""
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    data = torch.randint(0, WORDS, (1000, BATCH, LENGTH), device="cuda")
    with trace(table=False) as t:
        for step in range(3):
            model(data[step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in model.named_parameters():
                average[name].lerp_(parameter.detach(), 0.1)
    frame = t.allocations()
    kept = frame[frame.role == "from_before"]
    assert kept.category.eq("functional").all()
    sizes = [tensor.nbytes for tensor in average.values()]
    assert set(sizes) <= set(kept.requested_bytes)
    assert kept.requested_bytes.sum() >= sum(sizes)
    assert not (frame.requested_bytes[frame.category == "unknown"] > 1 << 16).any()


class AddsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        return (x + self.second(x)).tanh()


class ChecksForward(nn.Module):
    """As transformers does from 5.23 on: what is run again is `layer.forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([AddsTwice(), AddsTwice()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer.forward, x, use_reentrant=False)
        return x


def test_what_a_checkpoint_runs_again_by_forward_belongs_to_its_layer() -> None:
    model = ChecksForward()
    with trace(model, table=False) as t:
        model.layers[0](torch.ones(4, 8))
        model.layers[1](torch.ones(4, 8))
        model(torch.ones(4, 8)).sum().backward()
    again = t.allocations().query("phase == 'recompute'")
    adds = again[again.op == "aten::add"]
    assert len(adds) == 4
    assert set(adds.module) == {"layers.0", "layers.1"}
