"""Sharding: what data parallelism holds in each process, and what ZeRO takes away.

Two ranks train the same model in each way: on two GPUs with NCCL, elsewhere in two processes on the
CPU with gloo. Each rank is traced.
"""

import multiprocessing
import queue
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytracer.lab.claims.claim import (
    CONFIRMED,
    DEPENDS,
    REFUTED,
    Measured,
    Statement,
    Verdict,
    mib,
)
from pytracer.lab.claims.experiment import Lab, experiment, explained, spread
from pytracer.lab.claims.subjects import models

# ---------------------------------------------------------------------- Z1: ZeRO beside DDP

Z1 = Statement(
    "Z1",
    sources=("S1",),
    quote="ZeRO: if the model fits, sharding and offload only slow things down",
)

_RANKS = 2
_WAYS = ("ddp", "ddp_bucket_view", "zero1", "zero2", "zero3", "zero3_offload")
_NEEDED = ("ddp", "ddp_bucket_view", "zero3")  # the judge reads these
_LIMIT_S = 60


@experiment("sharding", seconds=(240, 300), several=True)
def sharding(lab: Lab) -> dict[str, Any]:
    """DDP, ZeRO 1 (shards the state), 2 (and gradients), 3 (and weights), and 3 with offload."""
    on_cuda = lab.cuda and torch.cuda.device_count() >= _RANKS
    figures: dict[str, Any] = {"ranks": _RANKS, "where": "2 GPUs" if on_cuda else "2 CPU processes"}
    scale = lab.scale if on_cuda else "small"
    here = Lab("cuda" if on_cuda else "cpu", scale, lab.folder, lab.name, lab.traces)
    lost = {}
    for way in _WAYS:
        if way == "zero3_offload" and not on_cuda:
            continue
        answers, reason = _ranks(way, here)
        if reason and way in _NEEDED:
            raise RuntimeError(f"{way}: {reason}")
        if reason:
            lost[way] = reason
            continue
        for rank in range(_RANKS):
            here.traces[f"{way}_rank{rank}"] = answers[rank]["trace"]
        figures |= _sizes(way, answers)
    return {**figures, "lost": lost}


def _sizes(way: str, answers: dict[int, Any]) -> dict[str, Any]:
    """The figures of a way: for each size, that of the rank with more."""
    figures: dict[str, Any] = spread(f"{way}_s", answers[0]["seconds"])
    figures["parameters"] = answers[0]["parameters"]
    names = ("weights", "gradients", "optimizer_state", "communication")
    traces = [answer["trace"] for answer in answers.values()]
    for name in names:
        for when in ("most", "at_end"):
            figures[f"{way}_{name}_{when}"] = max(t["categories"][name][when] for t in traces)
    figures[f"{way}_peak"] = max(trace["peak_bytes"] for trace in traces)
    states = [sum(t["categories"][n]["at_end"] for n in names[:3]) for t in traces]
    figures[f"{way}_held"] = max(states)
    return figures


def _ranks(way: str, lab: Lab) -> tuple[dict[int, Any], str]:
    """The answer of each rank of one way, and the reason if one failed."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as store:
        sent = spawn.Queue()
        options = (way, str(Path(store) / "store"), lab, sent)
        ranks = [spawn.Process(target=_rank, args=(r, *options)) for r in range(_RANKS)]
        for each in ranks:
            each.start()
        answers: dict[int, Any] = {}
        reason = ""
        try:
            while len(answers) < _RANKS and not reason:
                rank, answers[rank] = sent.get(timeout=_LIMIT_S)
                reason = answers[rank] if isinstance(answers[rank], str) else ""
        except queue.Empty:
            reason = f"a rank did not answer in {_LIMIT_S} s"
        for each in ranks:
            if not reason:
                each.join()
            each.kill()  # a rank would wait for ever for another one that failed
    return answers, reason


def _rank(rank: int, way: str, store: str, lab: Lab, sent: Any) -> None:
    """One process. It sends its answer, or the error as a text."""
    try:
        sent.put((rank, _trained(rank, way, store, lab)))
    except Exception as error:
        traceback.print_exc()
        sent.put((rank, f"{type(error).__name__}: {error}"))


def _trained(rank: int, way: str, store: str, lab: Lab) -> dict[str, Any]:
    """Trains with the other rank: three traced steps, then timed ones."""
    from torch import distributed

    device = f"cuda:{rank}" if lab.cuda else "cpu"
    if lab.cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    options: dict[str, Any] = {"device_id": torch.device(device)} if lab.cuda else {}
    distributed.init_process_group(
        "nccl" if lab.cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=_RANKS,
        **options,
    )
    torch.manual_seed(0)
    width, layers, length = lab.pick((128, 2, 32), (1024, 12, 256))
    base = models.Encoder(1000, width, layers, length)
    count = sum(p.numel() for p in base.parameters())
    tokens = torch.randint(1000, (4, length), device=device)
    own = Lab(device, lab.scale, lab.folder, lab.name)
    label = f"{way}_rank{rank}"
    # The trace begins before the weights exist, so it sees buckets and shards appear.
    with own.traced(label):
        net, optimizer = _prepared(base, way, device)

        def step() -> None:
            nn.functional.cross_entropy(net(tokens), tokens[:, 0] % 2).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
    slow = way == "zero3_offload"  # its optimizer runs on the CPU
    seconds = lab.seconds(step, warm=1, rounds=3 if slow else lab.pick(7, 15))
    distributed.destroy_process_group()
    return {"seconds": seconds, "parameters": count, "trace": own.traces[label]}


def _prepared(base: nn.Module, way: str, device: str) -> tuple[nn.Module, Any]:
    """The model and its optimizer, wrapped for this way."""
    if way in ("ddp", "ddp_bucket_view", "zero1"):
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        net = DistributedDataParallel(
            base.to(device), gradient_as_bucket_view=way == "ddp_bucket_view"
        )
        if way == "zero1":
            return net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW)
        return net, torch.optim.AdamW(net.parameters())
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh = init_device_mesh(torch.device(device).type, (_RANKS,))
    again = way != "zero2"
    policy: dict[str, Any] = (
        {"offload_policy": CPUOffloadPolicy()} if way == "zero3_offload" else {}
    )
    base = base if policy else base.to(device)
    assert isinstance(base, models.Encoder)
    for block in base.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=again, **policy)
    fully_shard(base, mesh=mesh, reshard_after_forward=again, **policy)
    return base, torch.optim.AdamW(base.parameters())


@experiment("data_parallel", gpus=_RANKS, several=True)
def data_parallel(lab: Lab) -> dict[str, Any]:
    """One process that copies its model to the other GPU in each step: the peak of each GPU."""
    width, layers, length = lab.pick((128, 2, 32), (1024, 12, 256))
    base = models.Encoder(1000, width, layers, length).to(lab.device)
    net = nn.DataParallel(base, device_ids=list(range(_RANKS)))
    optimizer = torch.optim.AdamW(base.parameters())
    tokens = torch.randint(1000, (4 * _RANKS, length), device=lab.device)
    with lab.traced("training", net, optimizer) as t:
        for _ in range(3):
            nn.functional.cross_entropy(net(tokens), tokens[:, 0] % 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    for index in range(_RANKS):
        name = f"training_gpu{index}"
        lab.traces[name] = explained(t, f"cuda:{index}", lab.path("training").name)
    del lab.traces["training"]
    return {f"gpu{i}_peak": lab.traces[f"training_gpu{i}"]["peak_bytes"] for i in range(_RANKS)}


@Z1.judged_by(
    "REFUTED if a rank of ZeRO 3 holds over 60 % of what one of DDP does; CONFIRMED if no way of "
    "sharding is faster than DDP by more than the spread; else DEPENDS",
    experiments=("sharding",),
    welcome=("data_parallel",),
    without_gpu="Bytes per rank as on GPUs; times are of processes that share this CPU.",
)
def sharding_only_slows_down(measured: Measured) -> Verdict:
    """ZeRO 3 must hold about half of DDP's bytes, and no way may be faster than DDP."""
    figures = measured["sharding"]
    ways = [way for way in _WAYS[2:] if f"{way}_held" in figures]
    text = (
        f"on {figures['where']}, DDP holds {mib(figures['ddp_held'])} at rest per rank: "
        + ", ".join(
            f"{way} {figures[f'{way}_held'] / figures['ddp_held']:.2f}x and "
            f"{figures[f'{way}_s'] / figures['ddp_s']:.2f}x the time"
            for way in ways
        )
    )
    copies = figures["ddp_communication_most"] / figures["parameters"]
    view = figures["ddp_bucket_view_communication_most"] / figures["parameters"]
    text += (
        f"; DDP's buckets at most {copies:.1f} B per parameter, {view:.1f} as views of gradients"
    )
    text += "".join(f"; {way} is not measured: {why}" for way, why in figures["lost"].items())
    if "data_parallel" in measured:
        peaks = measured["data_parallel"]
        text += (
            f"; DataParallel {mib(peaks['gpu0_peak'])} and {mib(peaks['gpu1_peak'])} at the peak"
        )
    if figures["zero3_held"] > 0.6 * figures["ddp_held"]:
        return Verdict(REFUTED, text, "sharding did not halve what a rank holds")
    faster = [way for way in ways if figures[f"{way}_s_high"] < figures["ddp_s_low"]]
    if not faster:
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, f"the machine: {', '.join(faster)} is faster here")
