"""Compares imagined ranks with real ones: the peak and each category, for each rank.

    python benchmarks/imagine_ranks.py --out benchmarks/results      # needs two GPUs and NCCL
    python benchmarks/imagine_ranks.py                               # without GPUs: imagines only
    sh benchmarks/on_gpu.sh OUT imagine_ranks                        # builds first
    python benchmarks/imagine_ranks.py --again FILE.json             # imagines again what FILE measured
    python benchmarks/imagine_ranks.py --again FILE.json --beside    # with another torch

Each program runs on two real GPUs, traced, and then imagined: each rank alone, in a process that
sees no GPU.
"""

import argparse
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.imagine import (  # noqa: E402
    add_again,
    answer,
    apart,
    bounds,
    gpus,
    imagined_again,
    write,
)
from benchmarks.imagine_programs import (  # noqa: E402
    GPT2,
    GPT2_SIZES,
    LLAMA,
    LLAMA_SIZES,
    fused,
    images,
    loop,
    of,
    words,
)
from programs import parallel  # noqa: E402

RANKS = 2
STEPS = 3
Wrap = Callable[[nn.Module, torch.device], nn.Module]

# ---------------------------------------------------------------- how they share the work


def fsdp2(**options: Any) -> Wrap:
    """Shards each layer, and then the rest."""

    def wrap(model: Any, device: torch.device) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        body = getattr(model, "model", None) or model.transformer
        for layer in body.layers if hasattr(body, "layers") else body.h:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        sharded: nn.Module = model
        return sharded

    return wrap


def mixed(**options: Any) -> Wrap:
    """FSDP2 that computes in bfloat16 and keeps float32."""

    def wrap(model: nn.Module, device: torch.device) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return fsdp2(mp_policy=policy, **options)(model, device)

    return wrap


def ddp(**options: Any) -> Wrap:
    """DistributedDataParallel."""

    def wrap(model: nn.Module, device: torch.device) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, device_ids=[device.index], **options)

    return wrap


def tensor_parallel(model: Any, device: torch.device) -> nn.Module:
    """Splits each layer's linear layers between the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("tp",))
    for layer in model.model.layers:
        plan = {
            **{f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    parallel: nn.Module = model
    return parallel


def join() -> torch.device:
    """Joins the other ranks, and returns this rank's card."""
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device


def trains(
    make: Callable[[], nn.Module],
    wrap: Wrap,
    batch: Callable[[str], dict[str, Any]],
    *,
    amp: bool = False,
    checkpoint: bool = False,
    micro: int = 1,
    optimizer: Callable[[nn.Module], Any] = fused,
) -> Callable[[], None]:
    """Returns one rank's program."""

    def program() -> None:
        import torch.distributed as dist

        device = join()
        torch.manual_seed(0)
        model = make().to(device).train()
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model = wrap(model, device)
        updates = optimizer(model)
        for _ in range(STEPS):
            for number in range(micro):
                if isinstance(model, nn.parallel.DistributedDataParallel):
                    model.require_backward_grad_sync = number == micro - 1
                with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
                    loss = model(**batch(str(device)))["loss"]
                loss.backward()
                float(loss.item())
                del loss
            updates.step()
            updates.zero_grad()
        dist.destroy_process_group()

    return program


# ---------------------------------------------------------------- pipelines


class Stage(nn.Module):
    """A part of a stack of equal layers."""

    def __init__(self, layers: int, width: int) -> None:
        """Makes the layers."""
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(layers)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs them."""
        result: torch.Tensor = self.layers(x)
        return result


def pipeline() -> None:
    """Two stages of unequal size, four micro-batches, one forward and one backward in turn."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    device = join()
    rank, width = dist.get_rank(), 1024
    model = Stage((3, 5)[rank], width).to(device)
    updates = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(16, 512, width, device=device)
    like = torch.empty(4, 512, width, device=device, requires_grad=True)  # as torch 2.13 asks
    stage = PipelineStage(model, rank, RANKS, device, input_args=like, output_args=like)
    del like
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    for _ in range(STEPS):
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x)
        updates.step()
        updates.zero_grad()
    dist.destroy_process_group()


PROGRAMS: dict[str, Callable[[], None]] = {
    "FSDP2, Llama, fp32": trains(of(*LLAMA, **LLAMA_SIZES), fsdp2(), words(32000, 4, 512)),
    "FSDP2, Llama, bfloat16": trains(of(*LLAMA, **LLAMA_SIZES), mixed(), words(32000, 4, 512)),
    "FSDP2, Llama, bfloat16, checkpointed": trains(
        of(*LLAMA, **LLAMA_SIZES), mixed(), words(32000, 4, 1024), checkpoint=True
    ),
    "FSDP2, GPT-2, kept gathered": trains(
        of(*GPT2, **GPT2_SIZES), mixed(reshard_after_forward=False), words(50257, 4, 512)
    ),
    "DDP, GPT-2, AMP": trains(of(*GPT2, **GPT2_SIZES), ddp(), words(50257, 4, 512), amp=True),
    "DDP, Llama, gradients in buckets": trains(
        of(*LLAMA, **LLAMA_SIZES), ddp(gradient_as_bucket_view=True), words(32000, 2, 512)
    ),
    "DDP, GPT-2, accumulation": trains(
        of(*GPT2, **GPT2_SIZES), ddp(), words(50257, 4, 512), amp=True, micro=2
    ),
    "DDP, ResNet-50, AMP, buffers": trains(
        of("ResNetForImageClassification", "ResNetConfig", num_labels=1000),
        ddp(find_unused_parameters=True),
        images(32, 224),
        amp=True,
    ),
    "tensor parallel, Llama, AMP": trains(
        of(*LLAMA, **LLAMA_SIZES), tensor_parallel, words(32000, 4, 512), amp=True, optimizer=loop
    ),
    "pipeline, two unequal stages": pipeline,
}


def small(way: parallel.Way) -> Callable[[], None]:
    """A way of `programs/parallel.py`, of a Llama with 0.16 B parameters."""

    def program() -> None:
        import torch.distributed as dist

        device = join()
        place = parallel.Place(dist.get_rank(), RANKS, str(device), "middle")
        training = way.build(place)
        for _ in range(STEPS):
            training.step()
        dist.destroy_process_group()

    return program


PROGRAMS |= {
    f"small Llama, {name.replace('_', ' ')}": small(way)
    for name, way in (parallel.WAYS | parallel.VARIANTS).items()
    if way.ranks == RANKS and name != "fsdp2_offloaded"
}

# ---------------------------------------------------------------- how they run


def real(name: str, rank: int, port: int) -> dict[str, Any]:
    """Runs one rank on its GPU, traced."""
    import pytracer

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.cuda.set_device(rank)
    with pytracer.trace(devices="cuda", table=False) as t:
        PROGRAMS[name]()
    stats = torch.cuda.memory_stats()
    return {
        "device": torch.cuda.get_device_name(),
        "requested": stats["requested_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        **_of_trace(t),
    }


def imagined(name: str, rank: int, port: int) -> dict[str, Any]:
    """Imagines one rank, where no GPU is visible."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import pytracer

    with pytracer.imagine("H100", ranks=RANKS, rank=rank) as t:
        PROGRAMS[name]()
    counters = t.data.meta["counters"]["end"]["cuda:0"]
    return {
        "requested": counters["requested_bytes.peak"],
        "reserved": counters["reserved_bytes.peak"],
        **bounds(t),
        **_of_trace(t),
    }


def _of_trace(t: Any) -> dict[str, Any]:
    peak = t.peak
    return {
        "peak": peak.bytes,
        "phase": peak.phase,
        "by_category": {name: amount for name, amount in peak.by_category.items() if amount},
    }


WAYS: dict[str, Callable[[str, int, int], dict[str, Any]]] = {"real": real, "imagined": imagined}


def run_ranks(way: str, name: str) -> list[dict[str, Any]]:
    """Runs each rank in a process of its own, all at once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return apart(__file__, [[way, name, str(rank), str(port)] for rank in range(RANKS)])


# ---------------------------------------------------------------- what they say


def errors_of(measured: dict[str, Any], guess: dict[str, Any]) -> dict[str, Any]:
    """The errors of one rank's peaks, and of each category as a share of the peak."""
    if "problem" in measured or "problem" in guess:
        return {"problem": measured.get("problem") or guess.get("problem")}
    categories = {*measured["by_category"], *guess["by_category"]}
    return {
        "requested": guess["requested"] / measured["requested"] - 1,
        "reserved": guess["reserved"] / measured["reserved"] - 1,
        "by_category": {
            name: (guess["by_category"].get(name, 0) - measured["by_category"].get(name, 0))
            / measured["peak"]
            for name in sorted(categories)
        },
    }


def line(name: str, rank: int, row: dict[str, Any]) -> str:
    """Returns one line for a rank."""
    start = f"{name:38} rank {rank}  "
    wrong = row["errors"][rank] if "errors" in row else row["imagined"][rank]
    if "problem" in wrong:
        return start + str(wrong["problem"])
    if "errors" not in row:
        return start + f"{wrong['requested'] / 2**20:9.1f} MiB imagined"
    worst = max(wrong["by_category"].items(), key=lambda one: abs(one[1]))
    return start + (
        f"{row['real'][rank]['requested'] / 2**20:9.1f} MiB  requested {wrong['requested']:+8.3%}  "
        f"reserved {wrong['reserved']:+8.3%}  worst category {worst[0]} {worst[1]:+.2%}"
    )


def main() -> None:
    """Runs the command line."""
    if sys.argv[1:2] == ["--apart"]:
        way, name, rank, port, file = sys.argv[2:]
        answer(lambda: WAYS[way](name, int(rank), int(port)), Path(file))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="programs whose name has this")
    parser.add_argument("--at-once", type=int, default=4, help="programs that run at the same time")
    add_again(parser)
    options = parser.parse_args()
    if options.again:
        imagined_again(
            options.again,
            lambda name: {"imagined": run_ranks("imagined", name)},
            _judge,
            only=options.only,
            beside=options.beside,
        )
        return
    names = [name for name in PROGRAMS if options.only in name]
    ways = ["imagined", "real"] if gpus() >= RANKS else ["imagined"]
    rows: dict[str, dict[str, Any]] = {name: {} for name in names}
    with ThreadPoolExecutor(options.at_once) as pool:
        running = {pool.submit(run_ranks, way, name): (way, name) for name in names for way in ways}
        for done in as_completed(running):
            way, name = running[done]
            row = rows[name]
            row[way] = done.result()
            if len(row) < len(ways):
                continue
            _judge(name, row)
            _keep(options.out, rows)


def _judge(name: str, row: dict[str, Any]) -> None:
    """Adds the errors to the row, and prints a line for each rank."""
    if "real" in row:
        row["errors"] = list(map(errors_of, row["real"], row["imagined"]))
    for rank in range(RANKS):
        print(line(name, rank, row), flush=True)


def _keep(folder: Path | None, rows: dict[str, dict[str, Any]]) -> None:
    """Writes what has been measured so far."""
    measured = {name: row for name, row in rows.items() if "errors" in row}
    devices = {one.get("device", "") for row in measured.values() for one in row["real"]} - {""}
    if devices:
        document = {"ranks": RANKS, "programs": measured}
        write(folder, "imagine-ranks", document, f"{RANKS}x {min(devices)}")


if __name__ == "__main__":
    main()
