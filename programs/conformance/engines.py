"""Other ways in which torch runs a training step: transforms, graphs, compilers, threads, several ranks.

Each program says what its tensors are. Those that need a GPU are marked.
"""

import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from programs.conformance.programs import ON_A_GPU, PROGRAMS, Program, Says, a_model, program
from programs.conformance.trainings import finish


def on_a_gpu(run: Program) -> Program:
    """On the CPU there is no such thing."""
    ON_A_GPU.add(run.__name__)
    return program(run)


def plain_steps(says: Says, called: Callable[..., Tensor], *parts: Any, rows: int = 33) -> None:
    """Three steps; parts are models, and an optimizer at the end."""
    *models, optimizer = parts
    for _ in range(3):
        x, y = torch.randn(rows, 64), torch.randn(rows, 64)
        loss = F.mse_loss(called(x), y)
        says.are("inputs/batch", x)
        says.are("inputs/target", y)
        finish(says, loss, optimizer, *models)


# -------------------------------------------------------------------------- transforms


@program
def gradients_of_each_example(says: Says) -> None:
    """Differential privacy: `vmap` of `grad`, clipped and noised, put into `.grad`."""
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, weights, (x[None],))[0], y)

    with says.traced(model, optimizer):
        for _ in range(3):
            x, y = torch.randn(10, 64), torch.randn(10, 64)
            weights = {name: p.detach() for name, p in model.named_parameters()}
            each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
            for name, parameter in model.named_parameters():
                parameter.grad = each[name].clamp(-1, 1).mean(0)
            del each, weights
            says.look(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()


@program
def an_ensemble_is_stacked(says: Says) -> None:
    """Its weights are leaves in a dictionary, and the optimizer's."""
    models = [a_model() for _ in range(3)]
    stacked, _ = stack_module_state(models)  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(stacked.values())

    def call(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(models[0], weights, (x,))
        return out

    with says.traced(optimizer):
        for _ in range(3):
            x = torch.randn(20, 64)
            vmap(call, in_dims=(0, None))(stacked, x).square().mean().backward()
            says.are("weights", *stacked.values())
            says.are("gradients", *(w.grad for w in stacked.values()))
            optimizer.step()
            states = optimizer.state.values()
            says.are("optimizer_state/exp_avg", *(state["exp_avg"] for state in states))
            optimizer.zero_grad()


@program
def curvature_by_a_product(says: Says) -> None:
    """A Hessian times a vector, by `jvp` of `grad`."""
    model = a_model()
    with says.traced(model):
        for _ in range(3):
            x = torch.randn(20, 64)

            def loss(weights: dict[str, Tensor], x: Tensor = x) -> Tensor:
                return functional_call(model, weights, (x,)).square().mean()

            weights = {name: p.detach() for name, p in model.named_parameters()}
            ways = {name: torch.randn_like(p) for name, p in weights.items()}
            _, bent = jvp(grad(loss), (weights,), (ways,))
            says.look(model)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter -= 0.01 * bent[name]
            del bent


@program
def gradients_forward_alone(says: Says) -> None:
    """Forward-mode: a direction is carried with the weights, and there is no backward."""
    model = a_model()
    with says.traced(model):
        for _ in range(3):
            x = torch.randn(20, 64)
            ways = {name: torch.randn_like(p) for name, p in model.named_parameters()}
            with torch.no_grad(), forward_ad.dual_level():
                pairs = model.named_parameters()
                dual = {name: forward_ad.make_dual(p, ways[name]) for name, p in pairs}
                out = functional_call(model, dual, (x,)).square().mean()
                slope = forward_ad.unpack_dual(out).tangent
                assert slope is not None
                says.look(model)
                for name, parameter in model.named_parameters():
                    parameter -= 0.01 * slope * ways[name]
                del dual, out


@program
def physics_in_the_loss(says: Says) -> None:
    """The model's own second derivative is what has to be small."""
    model = a_model(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(3):
            x = torch.rand(30, 1).requires_grad_()
            u = model(x)
            (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
            loss = (second + u).square().mean()
            says.are("inputs/batch", x)
            del u, first, second
            loss.backward(inputs=list(model.parameters()))
            says.look(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()


# -------------------------------------------------------------------------- programs as graphs


def training_of(change: Callable[[nn.Module], Any]) -> Program:
    """A plain training of what a compiler or the like makes of a model."""

    def run(says: Says) -> None:
        model = a_model()
        called = change(model)
        trained = called if isinstance(called, nn.Module) else model
        optimizer = torch.optim.AdamW(trained.parameters())
        with says.traced(trained, optimizer):
            plain_steps(says, called, trained, optimizer)

    return run


def exported_with_any_batch(model: nn.Module) -> nn.Module:
    rows = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(model, (torch.randn(33, 64),), dynamic_shapes=(rows,))
    return torch.export.unflatten(program)


def by_aot(model: nn.Module) -> Any:
    from functorch.compile import aot_module, nop

    return aot_module(model, fw_compiler=nop, bw_compiler=nop)


def scripted(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return torch.jit.script(model)


def recorded(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, torch.randn(33, 64))


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "compiled_to_an_eager_graph": lambda model: torch.compile(model, backend="eager"),
    "compiled_ahead_of_time": lambda model: torch.compile(model, backend="aot_eager"),
    "made_by_aot_autograd": by_aot,
    "traced_by_fx": torch.fx.symbolic_trace,
    "exported_with_any_batch": exported_with_any_batch,
    "scripted": scripted,
    "recorded_as_a_script": recorded,
    "called_by_a_function": lambda model: lambda x: functional_call(model, {}, (x,)),
    "in_data_parallel_on_one_device": lambda model: nn.DataParallel(model, device_ids=[0]),
    "recomputed_inside_a_compiler": lambda model: torch.compile(
        lambda x: checkpoint(model, x, use_reentrant=False), backend="aot_eager"
    ),
}
for _name, _change in CHANGES.items():
    PROGRAMS[f"a_model_{_name}"] = training_of(_change)


@on_a_gpu
def graphed_callables_are_trained(says: Says) -> None:
    """CUDA graphs of forward and backward: what they use is one pool, weights and state are as ever."""
    model = a_model()
    called = torch.cuda.make_graphed_callables(model, (torch.randn(33, 64),))
    optimizer = torch.optim.AdamW(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(3):
            x, y = torch.randn(33, 64), torch.randn(33, 64)
            loss = F.mse_loss(called(x), y)
            says.are("inputs/batch", x)
            says.are("inputs/target", y)
            says.are("weights/parameter", *model.parameters())
            loss.backward()
            says.are("gradients", *(p.grad for p in model.parameters()))
            optimizer.step()
            for state in optimizer.state.values():
                says.are("optimizer_state/exp_avg", state["exp_avg"])
            optimizer.zero_grad()


@on_a_gpu
def batches_come_on_a_stream_of_their_own(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    side = torch.cuda.Stream()
    with says.traced(model, optimizer):
        for _ in range(3):
            with torch.cuda.stream(side):
                x = torch.randn(33, 64, device="cpu").pin_memory().cuda(non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            x.record_stream(torch.cuda.current_stream())
            says.are("inputs/batch", x)
            finish(says, F.mse_loss(model(x), x), optimizer, model)


@on_a_gpu
def activations_go_to_the_host_and_come_back(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(3):
            x, y = torch.randn(33, 64), torch.randn(33, 64)
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                loss = (model(x) - y).abs().mean()
            says.are("inputs/batch", x)
            says.are("inputs/target", y)
            finish(says, loss, optimizer, model)


@on_a_gpu
def attention_of_a_formula(says: Says) -> None:
    """`flex_attention`: scores by a function of the program's."""
    from torch.nn.attention.flex_attention import flex_attention

    model = nn.Linear(64, 3 * 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def causal(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(q >= k, score, -torch.inf)

    with says.traced(model, optimizer):
        for _ in range(3):
            x = torch.randn(2, 128, 64)
            q, k, v = model(x).view(2, 128, 4, 48).transpose(1, 2).chunk(3, -1)
            out = flex_attention(q, k, v, score_mod=causal)
            says.are("inputs/batch", x)
            assert isinstance(out, Tensor)
            finish(says, out.square().mean(), optimizer, model)


@program
def attention_of_a_formula_without_training(says: Says) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    model = nn.Linear(64, 3 * 64)
    with says.traced(model), torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 32, 64)
            q, k, v = model(x).view(2, 32, 4, 48).transpose(1, 2).chunk(3, -1)
            out = flex_attention(q, k, v)
            says.are("inputs/batch", x)
            says.look(model)
            del q, k, v, out


# -------------------------------------------------------------------------- functions of the program


class Square(torch.autograd.Function):
    """What it keeps beside torch's own is on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 2)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (twice,) = ctx.saved_tensors
        return slope * twice


class WithFunction(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(64, 64), nn.Linear(64, 64), function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.function(self.first(x)))
        return y


@torch.library.custom_op("conformance::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    """An operator of the program's own."""
    return x * x * x


cube.register_autograd(
    lambda ctx, slope: slope * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class NeedsNoMemory(torch.autograd.Function):
    """A reversible block: backward makes its input again from its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        with torch.enable_grad():
            x = y.detach().log().requires_grad_()
            again = x.exp()
        (found,) = torch.autograd.grad(again, x, slope)
        return found


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "with_a_tensor_of_its_own": lambda x: Square.apply(x),
    "as_an_operator": lambda x: cube(x),
    "that_is_reversed": lambda x: NeedsNoMemory.apply(x),
    "on_the_way_back": lambda x: x.relu_().view(-1, 64).mul(2),
    "with_a_hook": lambda x: (x.register_hook(lambda g: g.clamp(-1, 1)), x.tanh())[1],
    "without_autocast": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True) * x,
    "by_fft": lambda x: torch.fft.irfft(torch.fft.rfft(x), n=64),
}


def training_with_function(function: Callable[[Tensor], Tensor]) -> Program:
    def run(says: Says) -> None:
        model = WithFunction(function)
        optimizer = torch.optim.AdamW(model.parameters())
        with says.traced(model, optimizer):
            for _ in range(3):
                x, y = torch.randn(33, 64), torch.randn(33, 64)
                loss = F.mse_loss(model(x), y)
                says.saves(loss, model, x, y)
                says.are("inputs/batch", x)
                says.are("inputs/target", y)
                finish(says, loss, optimizer, model)

    return run


for _name, _function in FUNCTIONS.items():
    PROGRAMS[f"a_function_{_name}"] = training_with_function(_function)


# -------------------------------------------------------------------------- threads


@program
def batches_are_made_by_a_thread(says: Says) -> None:
    """Up to two wait in a queue."""
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    ready: queue.Queue[tuple[Tensor, Tensor]] = queue.Queue(maxsize=2)

    def produce() -> None:
        for _ in range(4):
            ready.put(
                (torch.randn(33, 64, device=says.device), torch.randn(33, 64).to(says.device))
            )

    with says.traced(model, optimizer):
        thread = threading.Thread(target=produce)
        thread.start()
        for _ in range(4):
            x, y = ready.get()
            loss = (model(x) - y).abs().mean()
            says.are("inputs/batch", x)
            says.are("inputs/target", y)
            finish(says, loss, optimizer, model)
        thread.join()


@program
def backward_runs_in_a_thread_of_the_program(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(3):
            x = torch.randn(33, 64)
            loss = F.mse_loss(model(x), x)
            says.are("inputs/batch", x)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            says.look(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()


@program
def a_thread_saves_what_another_trains(says: Says) -> None:
    """A checkpoint is copied beside the training."""
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    kept: list[Tensor] = []

    def save() -> None:
        kept[:] = [p.detach().clone() for p in model.parameters()]

    with says.traced(model, optimizer):
        for _ in range(3):
            x = torch.randn(33, 64)
            finish(says, F.mse_loss(model(x), x), optimizer, model)
            thread = threading.Thread(target=save)
            thread.start()
            thread.join()
            says.are("functional", *kept)


# -------------------------------------------------------------------------- several ranks, of which this is one


@contextmanager
def a_group(says: Says) -> Iterator[None]:
    backend = "nccl" if says.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.device("cpu") if says.device == "cpu" else nullcontext():
            yield
    finally:
        dist.destroy_process_group()


@program
def gradients_are_reduced_in_buckets(says: Says) -> None:
    """DistributedDataParallel; gradients are views of its buckets or copied to them."""
    with a_group(says):
        model = a_model()
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with says.traced(wrapped, optimizer):
            plain_steps(says, wrapped, model, optimizer)


@program
def gradients_wait_for_the_last_pass(says: Says) -> None:
    with a_group(says):
        model = a_model()
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with says.traced(wrapped, optimizer):
            for number in range(8):
                x = torch.randn(33, 64)
                with wrapped.no_sync() if number % 4 != 3 else nullcontext():
                    F.mse_loss(wrapped(x), x).backward()
                says.are("inputs/batch", x)
                says.look(model, optimizer)
                if number % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()


@program
def the_state_is_shared_out(says: Says) -> None:
    """ZeRO's first stage."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with a_group(says):
        model = a_model()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        with says.traced(model, optimizer):
            for _ in range(3):
                x = torch.randn(33, 64)
                F.mse_loss(model(x), x).backward()
                says.are("weights/parameter", *model.parameters())
                says.are("gradients", *(p.grad for p in model.parameters()))
                optimizer.step()
                for state in optimizer.optim.state.values():
                    says.are("optimizer_state/exp_avg", state["exp_avg"])
                optimizer.zero_grad()


def local(tensor: Any) -> Tensor:
    """What a rank has of a distributed tensor."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def say_shards(says: Says, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    says.are("weights/parameter", *(local(p) for p in model.parameters()))
    says.are("gradients", *(local(p.grad) for p in model.parameters() if p.grad is not None))
    for state in optimizer.state.values():
        says.are("optimizer_state/exp_avg", local(state["exp_avg"]))


@program
def layers_are_split_between_ranks(says: Says) -> None:
    """Tensor parallel: parameters are DTensors."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    with a_group(says):
        mesh = dist.init_device_mesh(says.device, (1,))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(a_model(), mesh, plan)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        with says.traced(model, optimizer):
            for _ in range(3):
                x = torch.randn(33, 64)
                loss = F.mse_loss(model(x), x)
                says.are("inputs/batch", x)
                loss.backward()
                say_shards(says, model, optimizer)
                optimizer.step()
                say_shards(says, model, optimizer)
                optimizer.zero_grad()


@program
def weights_are_sharded(says: Says) -> None:
    """FSDP's second version."""
    from torch.distributed.fsdp import fully_shard

    with a_group(says):
        mesh = dist.init_device_mesh(says.device, (1,))
        model = a_model()
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        with says.traced(model, optimizer):
            for _ in range(3):
                x = torch.randn(33, 64)
                loss = F.mse_loss(model(x), x)
                says.are("inputs/batch", x)
                loss.backward()
                say_shards(says, model, optimizer)
                optimizer.step()
                say_shards(says, model, optimizer)
                optimizer.zero_grad()


@program
def products_are_of_eight_bits(says: Says) -> None:
    """torchao's training in float8: weights, gradients and state are as wide as ever."""
    pytest.importorskip("torchao", reason="float8 needs torchao", exc_type=ImportError)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    optimizer = torch.optim.AdamW(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(3):
            x, y = torch.randn(16, 64), torch.randn(16, 32)
            loss = F.mse_loss(model(x), y)
            says.are("inputs/batch", x)
            says.are("inputs/target", y)
            loss.backward()
            says.are("weights/parameter", *model.parameters())
            says.are("gradients", *(p.grad for p in model.parameters()))
            optimizer.step()
            for state in optimizer.state.values():
                says.are("optimizer_state/exp_avg", state["exp_avg"])
            optimizer.zero_grad()


# -------------------------------------------------------------------------- how a model comes to be


@program
def weights_are_made_where_they_are_needed(says: Says) -> None:
    """Built without memory, and filled in the trace."""
    with torch.device("meta"):
        model = a_model()
    optimizer = torch.optim.AdamW
    with says.traced():
        model.to_empty(device=says.device)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
        plain_steps(says, model, model, optimizer(model.parameters()))


@program
def weights_change_their_type(says: Says) -> None:
    """Loaded in float32 and trained in bfloat16."""
    model = a_model()
    with says.traced(model):
        model.bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        for _ in range(3):
            x = torch.randn(33, 64)
            given = x.bfloat16()
            loss = F.mse_loss(model(given).float(), x)
            says.are("inputs/batch", given)
            says.are("inputs/target", x)
            finish(says, loss, optimizer, model)


@program
def weights_are_replaced_by_those_of_a_file(says: Says) -> None:
    model = a_model()
    with says.traced(model):
        state = {name: torch.randn_like(p) for name, p in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        del state
        optimizer = torch.optim.AdamW(model.parameters())
        plain_steps(says, model, model, optimizer)


@program
def checkpoints_stand_in_one_another(says: Says) -> None:
    model = nn.Sequential(a_model(), a_model())
    optimizer = torch.optim.AdamW(model.parameters())

    def inner(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(model[1], model[0](x), use_reentrant=False)
        return y

    with says.traced(model, optimizer):
        plain_steps(says, lambda x: checkpoint(inner, x, use_reentrant=False), model, optimizer)


@program
def passes_run_from_several_roots(says: Says) -> None:
    """Two heads, one call of `backward` for both, with weights for each."""
    trunk, heads = a_model(), nn.ModuleList(nn.Linear(64, 8) for _ in range(2))
    parts = nn.ModuleList([trunk, heads])
    optimizer = torch.optim.AdamW(parts.parameters())
    with says.traced(parts, optimizer):
        for _ in range(3):
            h = trunk(torch.randn(33, 64))
            outs = [head(h).square().sum(-1) for head in heads]
            says.look(parts, optimizer)
            torch.autograd.backward(outs, [torch.rand(33), torch.rand(33)])
            says.look(parts, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            del h, outs


@program
def a_slope_is_kept_of_what_is_no_weight(says: Says) -> None:
    """`retain_grad`: for a look at the hidden layer."""
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(3):
            x = torch.randn(33, 64)
            hidden = model[1](model[0](x))  # type: ignore[index]
            hidden.retain_grad()
            loss = model[2](hidden).square().mean()  # type: ignore[index]
            says.are("activations", hidden)
            says.saves(loss, model, x)
            finish(says, loss, optimizer, model)
            hidden.grad = None
