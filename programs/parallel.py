"""One language model, trained by several processes in each way that torch offers.

A way is a function that builds this rank's part. `Training.step` runs one step of it. Tests run the ways
with gloo on the CPU, and `benchmarks/ranks.py` with NCCL on GPUs and a model of a billion parameters.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, distributed, nn

from programs.conformance.models import FeedForward, Layer, Shape, Transformer, llama_shape


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    rank: int
    ranks: int
    device: str  # "cpu", "cuda:0"
    size: str = "tiny"  # or "middle", "large"

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]

    @property
    def shape(self) -> Shape:
        shape = llama_shape(self.size, tied=False)
        # Four layers, so that each of four stages has one.
        if self.size == "tiny":
            return replace(shape, layers=4, kv_heads=4)
        if self.size == "middle":
            return replace(shape, layers=8, width=1024, heads=16, inner=2816)
        return shape

    @property
    def rows(self) -> int:
        return 4 if self.size == "tiny" else 6

    @property
    def length(self) -> int:
        return {"tiny": 16, "middle": 1024, "large": 2048}[self.size]

    def mesh(self, *sizes: int, names: tuple[str, ...]) -> Any:
        return distributed.init_device_mesh(self.kind, sizes, mesh_dim_names=names)


@dataclass
class Training:
    """A rank's part of the training."""

    step: Callable[[], float | None]  # one step; the loss, on a rank that has it
    modules: list[nn.Module]
    optimizer: torch.optim.Optimizer
    gradients: int = 0  # the bytes of gradients on the rank's device, as backward left them


@dataclass(frozen=True)
class Way:
    """One way to train, and the number of ranks that it needs to show itself."""

    name: str
    build: Callable[[Place], Training]
    ranks: int = 2
    needs: str = ""  # "cuda"
    same: str = "bits"  # or "": the way itself does not repeat to the bit


WAYS: dict[str, Way] = {}
VARIANTS: dict[str, Way] = {}  # of the ways: other optimizers, accumulation, hooks
OFFLOADED_LAYERS = 4  # of the large model's


def way(ranks: int = 2, needs: str = "", same: str = "bits") -> Callable[..., Any]:
    def register(build: Callable[[Place], Training]) -> Callable[[Place], Training]:
        WAYS[build.__name__] = Way(build.__name__, build, ranks, needs, same)
        return build

    return register


def variant(build: Callable[[Place], Training]) -> Callable[[Place], Training]:
    VARIANTS[build.__name__] = Way(build.__name__, build)
    return build


# ---------------------------------------------------------------- what all ways share


def batch(place: Place, part: int, rows: int = 0) -> tuple[Tensor, Tensor]:
    """Words of this part of the data, and those that follow. Equal in each step."""
    maker = torch.Generator().manual_seed(100 + part)
    size = (rows or place.rows, place.length + 1)
    words = torch.randint(place.shape.vocabulary, size, generator=maker).to(place.device)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def model(place: Place, layers: int = 0) -> Transformer:
    """The same weights on each rank."""
    torch.manual_seed(0)
    shape = replace(place.shape, layers=layers) if layers else place.shape
    with torch.device(place.device):
        return Transformer(shape)


def trained(
    net: nn.Module,
    place: Place,
    *,
    part: int | None = None,
    scope: Callable[..., Any] | None = None,
    mixed: bool = False,
    make: Callable[..., Any] = torch.optim.AdamW,
    micro: int = 1,
    before_backward: Callable[[bool], None] = lambda last: None,
    before_step: Callable[[], None] = lambda: None,
) -> Training:
    """Trains `net` with AdamW. `part`: which data; by default each rank has its own."""
    ids, targets = batch(place, place.rank if part is None else part)
    # Parameters that are cut and others are in one optimizer: its loop over all at once cannot mix them.
    options = {"foreach": False} if mixed else {}
    optimizer = make(net.parameters(), lr=1e-4, **options)

    def step() -> float:
        for number in range(micro):
            before_backward(number == micro - 1)
            with nullcontext() if scope is None else scope(ids, targets):
                loss = loss_of(under_autocast(net, place, ids), targets)
                loss.backward()
        before_step()
        training.gradients = bytes_of((p.grad for p in net.parameters()), place)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    training = Training(step, [net], optimizer)
    return training


def under_autocast(net: nn.Module, place: Place, *inputs: Any) -> Tensor:
    """The large model computes in bfloat16."""
    with torch.autocast(place.kind, torch.bfloat16, enabled=place.size != "tiny"):
        result: Tensor = net(*inputs)
    return result


def bytes_of(tensors: Iterable[Any], place: Place) -> int:
    """The bytes of their storages on the rank's device, each once."""
    storages = {}
    for tensor in tensors:
        if tensor is None:
            continue
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.device.type == place.kind:
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def state_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def checkpointed(net: Transformer) -> None:
    """Has each layer remake its activations in backward."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Layer))


# ---------------------------------------------------------------- data parallel


def _ddp(place: Place, net: nn.Module | None = None, **options: Any) -> Training:
    from torch.nn.parallel import DistributedDataParallel

    whole = DistributedDataParallel(net or model(place), **options)
    return trained(whole, place)


@way()
def ddp(place: Place) -> Training:
    """Each rank has the whole model; buckets of gradients are summed over the ranks."""
    return _ddp(place)


@way()
def ddp_views(place: Place) -> Training:
    """Gradients are views of the buckets."""
    return _ddp(place, gradient_as_bucket_view=True)


@way()
def ddp_checkpointed(place: Place) -> Training:
    net = model(place)
    checkpointed(net)
    return _ddp(place, net)


def _accumulated(place: Place, **options: Any) -> Training:
    """Two batches a step. Only the second one's gradients are summed over the ranks."""
    from torch.nn.parallel import DistributedDataParallel

    whole = DistributedDataParallel(model(place), **options)

    def sums(last: bool) -> None:
        whole.require_backward_grad_sync = last

    return trained(whole, place, micro=2, before_backward=sums)


@variant
def ddp_accumulated(place: Place) -> Training:
    return _accumulated(place)


@variant
def ddp_views_accumulated(place: Place) -> Training:
    return _accumulated(place, gradient_as_bucket_view=True)


@variant
def ddp_unused(place: Place) -> Training:
    """Looks for parameters without a gradient in each step."""
    return _ddp(place, find_unused_parameters=True)


class Skipping(nn.Module):
    """The model without some of its layers, by the number of the step."""

    def __init__(self, net: Transformer, skips: Callable[[int], set[int]]) -> None:
        super().__init__()
        self.net, self.skips, self.steps = net, skips, 0

    def forward(self, ids: Tensor) -> Tensor:
        x, left_out = self.net.tokens(ids), self.skips(self.steps)
        self.steps += 1
        for number, layer in enumerate(self.net.layers):
            x = x if number in left_out else layer(x)[0]
        result: Tensor = self.net.head(self.net.norm(x))
        return result


@variant
def ddp_skips(place: Place) -> Training:
    """Parameters without a gradient, others in each step."""
    return _ddp(place, Skipping(model(place), _by_step), find_unused_parameters=True)


def _by_step(step: int) -> set[int]:
    """The last layer is never there."""
    return {3, step % 3}


@variant
def ddp_skips_views(place: Place) -> Training:
    whole = Skipping(model(place), _by_step)
    return _ddp(place, whole, find_unused_parameters=True, gradient_as_bucket_view=True)


@variant
def ddp_by_rank(place: Place) -> Training:
    """Each rank leaves out another layer, and gets its gradients from the other one."""
    whole = Skipping(model(place), lambda step: {place.rank})
    return _ddp(place, whole, find_unused_parameters=True)


@variant
def ddp_static(place: Place) -> Training:
    """The same parameters have no gradient in each step."""
    return _ddp(place, Skipping(model(place), lambda step: {0, 3}), static_graph=True)


@variant
def ddp_compressed(place: Place) -> Training:
    """Buckets are sent in half precision."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    whole = DistributedDataParallel(model(place))
    whole.register_comm_hook(None, fp16_compress_hook)
    return trained(whole, place)


@variant
def ddp_zero(place: Place) -> Training:
    """Each rank has the optimizer's state of some parameters, and sends them to the others."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    def make(parameters: Any, **options: Any) -> Any:
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **options)

    return trained(DistributedDataParallel(model(place)), place, make=make)


# ---------------------------------------------------------------- sharded


def _sharded(place: Place, net: Transformer, mesh: Any, **options: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)


def _fsdp(
    place: Place,
    *,
    checkpoint: bool = False,
    layers: int = 0,
    make: Callable[..., Any] = torch.optim.AdamW,
    **options: Any,
) -> Training:
    net = model(place, layers)
    if checkpoint:
        checkpointed(net)
    _sharded(place, net, place.mesh(place.ranks, names=("shard",)), **options)
    return trained(net, place, make=make)


@way()
def fsdp1(place: Place) -> Training:
    return _fsdp1(place, model(place))


def _fsdp1(place: Place, net: nn.Module, **options: Any) -> Training:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    whole = FullyShardedDataParallel(
        net,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        device_id=torch.device(place.device),
        use_orig_params=True,
        **options,
    )
    return trained(whole, place)


@variant
def fsdp1_mixed(place: Place) -> Training:
    """Gathers and reduces in bfloat16."""
    from torch.distributed.fsdp import MixedPrecision

    half = torch.bfloat16
    return _fsdp1(place, model(place), mixed_precision=MixedPrecision(half, half, half))


@variant
def fsdp1_checkpointed(place: Place) -> Training:
    net = model(place)
    checkpointed(net)
    return _fsdp1(place, net)


@way()
def fsdp2(place: Place) -> Training:
    """Weights, gradients and state are cut over the ranks; a layer is whole while it runs."""
    return _fsdp(place)


@way()
def fsdp2_kept(place: Place) -> Training:
    """Layers stay whole between forward and backward."""
    return _fsdp(place, reshard_after_forward=False)


@way()
def fsdp2_mixed(place: Place) -> Training:
    """Layers are whole in bfloat16 only."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _fsdp(place, mp_policy=policy)


@way(needs="cuda")
def fsdp2_offloaded(place: Place) -> Training:
    """Shards, gradients and state are on the host, where a step of Adam over all layers takes too long."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _fsdp(place, layers=OFFLOADED_LAYERS, offload_policy=CPUOffloadPolicy())


@way()
def fsdp2_checkpointed(place: Place) -> Training:
    return _fsdp(place, checkpoint=True)


@variant
def fsdp2_accumulated(place: Place) -> Training:
    """Two batches a step. The first one's gradients stay whole."""
    net = model(place)
    _sharded(place, net, place.mesh(place.ranks, names=("shard",)))
    sums: Callable[[bool], None] = net.set_requires_gradient_sync  # type: ignore[assignment]
    return trained(net, place, micro=2, before_backward=sums)


@variant
def fsdp2_fused(place: Place) -> Training:
    return _fsdp(place, make=partial(torch.optim.AdamW, fused=True))


@variant
def fsdp2_loop(place: Place) -> Training:
    return _fsdp(place, make=partial(torch.optim.Adam, foreach=False))


@variant
def fsdp2_momentum(place: Place) -> Training:
    return _fsdp(place, make=partial(torch.optim.SGD, momentum=0.9))


@way(ranks=4)
def hsdp(place: Place) -> Training:
    """Sharded inside groups of two; the groups hold the same."""
    net = model(place)
    mesh = place.mesh(place.ranks // 2, 2, names=("replicate", "shard"))
    _sharded(place, net, mesh)
    return trained(net, place)


# ---------------------------------------------------------------- inside a layer


def _split(net: Transformer, mesh: Any) -> None:
    """Cuts the matrices of each layer."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    columns, rows = ColwiseParallel, RowwiseParallel
    for layer in net.layers:
        plan = {f"attention.{name}": columns() for name in ("query", "key", "value")}
        plan |= {"attention.out": rows(), "mlp.gate": columns(), "mlp.up": columns()}
        parallelize_module(layer, mesh, {**plan, "mlp.down": rows()})
        _split_heads(layer, mesh)


def _split_sequences(net: Transformer, mesh: Any) -> None:
    """Cuts all matrices, and sequences where no matrix is."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    part, whole = Shard(1), Replicate()
    gathers = PrepareModuleInput(input_layouts=part, desired_input_layouts=whole)
    norm, columns, rows = (
        SequenceParallel(),
        ColwiseParallel(),
        RowwiseParallel(output_layouts=part),
    )
    for layer in net.layers:
        plan = {"norm_1": norm, "norm_2": norm, "attention": gathers, "mlp": gathers}
        plan |= {f"attention.{name}": columns for name in ("query", "key", "value")}
        plan |= {"attention.out": rows, "mlp.gate": columns, "mlp.up": columns, "mlp.down": rows}
        parallelize_module(layer, mesh, plan)
        _split_heads(layer, mesh)
    tokens = RowwiseParallel(input_layouts=whole, output_layouts=part)
    head = ColwiseParallel(input_layouts=part, output_layouts=whole)
    parallelize_module(net, mesh, {"tokens": tokens, "norm": norm, "head": head})


def _split_heads(layer: Any, mesh: Any) -> None:
    shape, ranks = layer.attention.shape, mesh.size()
    layer.attention.shape = replace(
        shape, heads=shape.heads // ranks, kv_heads=shape.kv_heads // ranks
    )


@way()
def tensor_parallel(place: Place) -> Training:
    """Each matrix of a layer is cut; all ranks see the same data."""
    net = model(place)
    _split(net, place.mesh(place.ranks, names=("tensor",)))
    return trained(net, place, part=0, mixed=True)


@variant
def sequence_parallel(place: Place) -> Training:
    """As `tensor_parallel`. Between its matrices each rank has a part of each sequence."""
    net = model(place)
    _split_sequences(net, place.mesh(place.ranks, names=("tensor",)))
    return trained(net, place, part=0, mixed=True)


@way(ranks=4)
def fsdp2_tensor_parallel(place: Place) -> Training:
    net = model(place)
    mesh = place.mesh(place.ranks // 2, 2, names=("shard", "tensor"))
    _split(net, mesh["tensor"])
    _sharded(place, net, mesh["shard"])
    return trained(net, place, part=place.rank // 2)


@way(needs="cuda", same="")
def context_parallel(place: Place) -> Training:
    """Each rank has a part of each sequence; keys and values go round."""
    from torch.distributed.tensor.experimental import context_parallel as parts
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.parallel import DistributedDataParallel

    mesh = place.mesh(place.ranks, names=("context",))
    net = DistributedDataParallel(model(place))

    class Scope:
        def __init__(self, *buffers: Tensor) -> None:
            self._parts = parts(mesh, buffers=list(buffers), buffer_seq_dims=[1] * len(buffers))
            self._kernel = sdpa_kernel(SDPBackend.FLASH_ATTENTION)

        def __enter__(self) -> None:
            self._parts.__enter__()
            self._kernel.__enter__()

        def __exit__(self, *error: object) -> None:
            self._kernel.__exit__(*error)
            self._parts.__exit__(*error)

    return trained(net, place, part=0, scope=Scope)


# ---------------------------------------------------------------- between layers


class Stage(nn.Module):
    """Some layers of the model; the first stage has the embedding, the last the head."""

    def __init__(self, net: Transformer, number: int, stages: int) -> None:
        super().__init__()
        first, last = (len(net.layers) * n // stages for n in (number, number + 1))
        self.tokens = net.tokens if number == 0 else None
        self.layers = nn.ModuleDict({str(n): net.layers[n] for n in range(first, last)})
        self.norm = net.norm if number == stages - 1 else None
        self.head = net.head if number == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tokens is None else self.tokens(x)
        for layer in self.layers.values():
            x = layer(x)[0]
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def _pipeline(place: Place, each: int, schedule: Any) -> Training:
    """`each`: stages per rank."""
    stages = place.ranks * each
    own = [place.rank + place.ranks * n for n in range(each)]
    net = model(place)
    parts = [Stage(net, number, stages) for number in own]
    del net
    micro = 2 * place.ranks
    made = [_stage(part, number, stages, place) for part, number in zip(parts, own, strict=True)]
    runs = schedule(made if each > 1 else made[0], n_microbatches=micro, loss_fn=loss_of)
    ids, targets = batch(place, 0, micro)
    parameters = [p for part in parts for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def step() -> float | None:
        losses: list[Tensor] = []
        inputs = (ids,) if 0 in own else ()
        last = stages - 1 in own
        runs.step(*inputs, **({"target": targets, "losses": losses} if last else {}))
        training.gradients = bytes_of((p.grad for p in parameters), place)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean().detach()) if losses else None

    training = Training(step, list(parts), optimizer)
    return training


def _stage(part: Stage, number: int, stages: int, place: Place) -> Any:
    """One row goes in and out at a time. Its shapes are said, so that a stage needs none before it."""
    from torch.distributed.pipelining import PipelineStage

    shape, size = place.shape, (1, place.length)
    hidden = torch.empty(*size, shape.width, device=place.device, requires_grad=True)
    logits = torch.empty(*size, shape.vocabulary, device=place.device, requires_grad=True)
    words = torch.empty(size, dtype=torch.int64, device=place.device)
    return PipelineStage(
        part,
        number,
        stages,
        torch.device(place.device),
        input_args=words if number == 0 else hidden,
        output_args=logits if number == stages - 1 else hidden,
    )


@way()
def pipeline(place: Place) -> Training:
    """Each rank has some layers; micro-batches go one forward, one backward."""
    from torch.distributed.pipelining import Schedule1F1B

    return _pipeline(place, 1, Schedule1F1B)


@variant
def pipeline_all_forward_first(place: Place) -> Training:
    """All micro-batches go forward, and then backward."""
    from torch.distributed.pipelining import ScheduleGPipe

    return _pipeline(place, 1, ScheduleGPipe)


@way()
def pipeline_interleaved(place: Place) -> Training:
    """Each rank has two stages that are not neighbours."""
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    return _pipeline(place, 2, ScheduleInterleaved1F1B)


# ---------------------------------------------------------------- experts


class ExpertsOfRanks(nn.Module):
    """Each rank has some experts. Every token goes to the expert of its position, and back."""

    def __init__(self, place: Place, experts: int) -> None:
        super().__init__()
        self.ranks, count = place.ranks, experts // place.ranks
        mine = range(place.rank * count, (place.rank + 1) * count)
        self.experts = nn.ModuleDict({str(n): FeedForward(place.shape) for n in mine})

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        tokens = x.flatten(0, 1)
        even = [len(tokens) // self.ranks] * self.ranks
        here = all_to_all_single_autograd(tokens, even, even, distributed.group.WORLD)
        parts = here.chunk(len(self.experts))
        made = [expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)]
        back = all_to_all_single_autograd(torch.cat(made), even, even, distributed.group.WORLD)
        whole: Tensor = back.view_as(x)
        return whole


@way()
def experts(place: Place) -> Training:
    """Experts are spread over the ranks, all else is on each."""
    net = model(place, layers=4 if place.size == "tiny" else 8)
    for number, layer in enumerate(net.layers):
        torch.manual_seed(1000 * number + place.rank)
        with torch.device(place.device):
            layer.mlp = ExpertsOfRanks(place, 2 * place.ranks)
    shared = [p for name, p in net.named_parameters() if ".experts." not in name]

    def sum_up() -> None:
        for parameter in shared:
            distributed.all_reduce(parameter.grad)

    return trained(net, place, before_step=sum_up)


# ---------------------------------------------------------------- a proof for one rank


def proof(name: str, place: Place, folder: Path, *, rounds: int = 0) -> dict[str, Any]:
    """Trains untraced and traced, and says what the trace should have and what it has.

    The trace goes into `folder`. `rounds`: so many blocks of steps are timed with and without a trace.
    """
    import pytracer

    plain = _run(name, place)
    del plain["training"]
    _forget(place)
    path = folder / f"train.rank{place.rank}.pytrace"
    options: dict[str, Any] = {"devices": place.kind, "table": False}
    with pytracer.trace(path=path, **options):
        traced = _run(name, place)
    training = traced.pop("training")
    document = {
        "way": name,
        "rank": place.rank,
        "ranks": place.ranks,
        "parameters": sum(p.numel() for module in training.modules for p in module.parameters()),
        "same": {key: plain[key] == traced[key] for key in ("losses", "parameters", "peak")},
        "peak_untraced": plain["peak"],
        "truth": {
            "weights": bytes_of(_kept(training.modules), place),
            "gradients": training.gradients,
            "optimizer_state": bytes_of(state_of(training.optimizer), place),
        },
        "trace": _seen(pytracer.load(path)),
    }
    if rounds and name != "fsdp2_offloaded":  # there the host's optimizer takes all the time
        torch.use_deterministic_algorithms(False)
        document["step_ratio"] = _ratio(training.step, place, rounds, options)
    return document


def _run(name: str, place: Place) -> dict[str, Any]:
    """Three steps from the same start."""
    cuda = place.kind == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    training = WAYS[name].build(place)
    losses = [training.step() for _ in range(3)]
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    checksum = [_checksum(each) for each in _kept(training.modules)]
    return {"losses": losses, "parameters": checksum, "peak": peak, "training": training}


def _kept(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The parameters and buffers, as far as this rank has them."""
    both = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    return [t.to_local() if hasattr(t, "to_local") else t for t in both]  # type: ignore[operator]


def _checksum(tensor: Tensor) -> int:
    """Differs if any bit does, or if two values change places."""
    values = (
        tensor.detach().flatten().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    )
    places = torch.arange(len(values), device=values.device) % 65_521 + 1
    return int((values * places).sum())  # 64 bits wide, and equal sums wrap around equally


def _forget(place: Place) -> None:
    import gc

    gc.collect()
    if place.kind == "cuda":
        torch.cuda.empty_cache()


def _seen(t: Any) -> dict[str, Any]:
    summary, rows = t.summary(), t.allocations()
    document = {
        "peak": t.peak.bytes,
        "at_end": summary.at_end.to_dict(),
        "most": summary.own_peak.to_dict(),
        "communication": sorted(set(rows[rows.category == "communication"].role.dropna())),
        "gathered": _most_at_once(t.data, "unsharded"),
    }
    if t.peak.device != "cpu":
        from pytracer.analysis.allocator import ledger

        books = ledger.ledger(t.data)
        document["ledger"] = [[row.name, row.bytes, row.level] for row in books.rows]
        document["residual"] = books.residual
    return document


def _most_at_once(trace: Any, role: str) -> int:
    from pytracer.analysis.facts import usage
    from pytracer.analysis.facts.allocations import allocations
    from pytracer.data.schema import CATEGORY, ROLE

    alloc = allocations(trace)
    which = (alloc.role == ROLE[role]) & (alloc.category == CATEGORY["weights"])
    return int(usage.highest_where(trace, which & usage.on_device(trace)).bytes)


def _ratio(
    step: Callable[[], Any], place: Place, rounds: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Seconds of a steady step, untraced and traced, in turns. All ranks take the same turns.

    The first two steps of a block are not among them: a recording reads their graphs. What it takes to
    begin and to end is counted by itself, with what these two steps took longer than untraced ones.
    """
    import statistics

    import pytracer

    def block() -> tuple[_Clocks, float]:
        """The clocks of the first two steps, and the seconds of each of the next three."""
        distributed.barrier()
        first = _clocked(place, lambda: (step(), step()))
        return first, _clocked(place, lambda: (step(), step(), step()))[0] / 3

    block()
    plain, traced, recordings = [], [], []
    for _ in range(rounds):
        first_plain, seconds = block()
        plain.append(seconds)
        trace = pytracer.trace(**options)
        begun = _clocked(place, trace.__enter__)
        try:
            first, seconds = block()
        finally:
            ended = _clocked(place, lambda trace=trace: trace.__exit__(None, None, None))
        traced.append(seconds)
        longer = (first[0] - first_plain[0], first[1] - first_plain[1])
        recordings.append({"begin": begun, "first_steps_longer": longer, "end": ended})
    ratios = sorted(t / p for t, p in zip(traced, plain, strict=True))
    return {
        "plain_s": plain,
        "traced_s": traced,
        "median": statistics.median(ratios),
        "recording_s": {
            part: {
                clock: statistics.median(one[part][at] for one in recordings)
                for at, clock in enumerate(("wall", "process"))
            }
            for part in recordings[0]
        },
    }


_Clocks = tuple[float, float]  # seconds of the wall's clock and of the process'


def _clocked(place: Place, work: Callable[[], Any]) -> _Clocks:
    import time

    began = time.perf_counter(), time.process_time()
    work()
    if place.kind == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def main() -> None:
    """One rank, started by torchrun. It tries one way after the other."""
    import argparse
    import os

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("ways", nargs="+", choices=WAYS)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", default="tiny", choices=["tiny", "middle", "large"])
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = f"cuda:{os.environ['LOCAL_RANK']}" if options.device == "cuda" else "cpu"
    place = Place(rank, ranks, device, options.size)
    if place.kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    kind = {"cpu": "gloo", "cuda": "nccl"}[place.kind]
    where = torch.device(device) if place.kind == "cuda" else None
    distributed.init_process_group(kind, device_id=where)
    for name in options.ways:
        _prove(name, place, options.folder / name, options.rounds)
    distributed.destroy_process_group()


def _prove(name: str, place: Place, folder: Path, rounds: int) -> None:
    """Writes the proof, or the error of a way that does not run here."""
    import json

    folder.mkdir(exist_ok=True, parents=True)
    # Without warn_only: with it, attention's backward would stay as it is.
    torch.use_deterministic_algorithms(place.kind == "cuda" and WAYS[name].same == "bits")
    try:
        document = proof(name, place, folder, rounds=rounds)
    except Exception as error:
        document = {"way": name, "problem": f"{type(error).__name__}: {error}"[:1000]}
    torch.use_deterministic_algorithms(False)
    (folder / f"rank{place.rank}.json").write_text(json.dumps(document))
    _forget(place)


if __name__ == "__main__":
    main()
