"""Several processes: what data parallelism holds in each, and what sharding takes away.

Two ranks train the same model in each way, NCCL between two GPUs and gloo between two CPU
processes elsewhere. Each rank is traced.
"""

import multiprocessing
import queue
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytracer.claims.claim import CONFIRMED, DEPENDS, REFUTED, Claim, Measured, Verdict, mib
from pytracer.claims.experiment import Lab, experiment, explained, spread
from pytracer.claims.subjects import models

_RANKS = 2
_WAYS = ("ddp", "ddp_bucket_view", "zero1", "zero2", "zero3", "zero3_offload")
_NEEDED = ("ddp", "ddp_bucket_view", "zero3")  # the verdict reads them
_LIMIT_S = 60


@experiment("sharding", seconds=(240, 300), several=True)
def sharding(lab: Lab) -> dict[str, Any]:
    """DDP, ZeRO 1 (sharded state), 2 (and gradients) and 3 (and weights), and with offload."""
    on_cuda = lab.cuda and torch.cuda.device_count() >= _RANKS
    found: dict[str, Any] = {"ranks": _RANKS, "where": "2 GPUs" if on_cuda else "2 CPU processes"}
    scale = lab.scale if on_cuda else "small"
    here = Lab("cuda" if on_cuda else "cpu", scale, lab.folder, lab.name, lab.traces)
    lost = {}
    for way in _WAYS:
        if way == "zero3_offload" and not on_cuda:
            continue
        told, reason = _ranks(way, here)
        if reason and way in _NEEDED:
            raise RuntimeError(f"{way}: {reason}")
        if reason:
            lost[way] = reason
            continue
        for rank in range(_RANKS):
            here.traces[f"{way}_rank{rank}"] = told[rank]["trace"]
        found |= _sizes(way, told)
    return {**found, "lost": lost}


def _ranks(way: str, lab: Lab) -> tuple[dict[int, Any], str]:
    """What the ranks of one way tell, or why they do not."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as store:
        answers = spawn.Queue()
        options = (way, str(Path(store) / "store"), lab, answers)
        ranks = [spawn.Process(target=_rank, args=(r, *options)) for r in range(_RANKS)]
        for each in ranks:
            each.start()
        told: dict[int, Any] = {}
        reason = ""
        try:
            while len(told) < _RANKS and not reason:
                rank, told[rank] = answers.get(timeout=_LIMIT_S)
                reason = told[rank] if isinstance(told[rank], str) else ""
        except queue.Empty:
            reason = f"a rank did not answer in {_LIMIT_S} s"
        for each in ranks:
            if not reason:
                each.join()
            each.kill()  # one whose other rank failed would wait for it for ever
    return told, reason


@experiment("data_parallel", gpus=_RANKS, several=True)
def data_parallel(lab: Lab) -> dict[str, Any]:
    """One process that copies its model to the other GPU in each step: what each of them holds."""
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


def _sizes(way: str, told: dict[int, Any]) -> dict[str, Any]:
    """The larger of the two ranks', of each."""
    found: dict[str, Any] = spread(f"{way}_s", told[0]["seconds"])
    found["parameters"] = told[0]["parameters"]
    names = ("weights", "gradients", "optimizer_state", "communication")
    traces = [told[rank]["trace"] for rank in told]
    for name in names:
        for when in ("most", "at_end"):
            found[f"{way}_{name}_{when}"] = max(t["categories"][name][when] for t in traces)
    found[f"{way}_peak"] = max(trace["peak_bytes"] for trace in traces)
    states = [sum(t["categories"][n]["at_end"] for n in names[:3]) for t in traces]
    found[f"{way}_held"] = max(states)
    return found


def _rank(rank: int, way: str, store: str, lab: Lab, answers: Any) -> None:
    """One process; whatever goes wrong in it is told."""
    try:
        answers.put((rank, _trained(rank, way, store, lab)))
    except Exception as error:
        traceback.print_exc()
        answers.put((rank, f"{type(error).__name__}: {error}"))


def _trained(rank: int, way: str, store: str, lab: Lab) -> dict[str, Any]:
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
    # From before the weights are there, so that buckets and shards are seen as they are made.
    with own.traced(label):
        net, optimizer = _prepared(base, way, device)

        def step() -> None:
            nn.functional.cross_entropy(net(tokens), tokens[:, 0] % 2).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
    slow = way == "zero3_offload"  # its optimizer is the CPU's
    seconds = lab.seconds(step, warm=1, rounds=3 if slow else lab.pick(7, 15))
    distributed.destroy_process_group()
    return {"seconds": seconds, "parameters": count, "trace": own.traces[label]}


def _prepared(base: nn.Module, way: str, device: str) -> tuple[nn.Module, Any]:
    """The model and its optimizer, as this way has them."""
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


# ---------------------------------------------------------------------- verdicts


def _only_slower(measured: Measured) -> Verdict:
    found = measured["sharding"]
    ways = [way for way in _WAYS[2:] if f"{way}_held" in found]
    text = (
        f"on {found['where']}, DDP holds {mib(found['ddp_held'])} at rest per rank: "
        + ", ".join(
            f"{way} {found[f'{way}_held'] / found['ddp_held']:.2f}x and "
            f"{found[f'{way}_s'] / found['ddp_s']:.2f}x the time"
            for way in ways
        )
    )
    copies = found["ddp_communication_most"] / found["parameters"]
    view = found["ddp_bucket_view_communication_most"] / found["parameters"]
    text += (
        f"; DDP's buckets at most {copies:.1f} B per parameter, {view:.1f} as views of gradients"
    )
    text += "".join(f"; {way} is not measured: {why}" for way, why in found["lost"].items())
    if "data_parallel" in measured:
        peaks = measured["data_parallel"]
        text += (
            f"; DataParallel {mib(peaks['gpu0_peak'])} and {mib(peaks['gpu1_peak'])} at the peak"
        )
    if found["zero3_held"] > 0.6 * found["ddp_held"]:
        return Verdict(REFUTED, text, "sharding did not halve what a rank holds")
    faster = [way for way in ways if found[f"{way}_s_high"] < found["ddp_s_low"]]
    if not faster:
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, f"the machine: {', '.join(faster)} is faster here")


CLAIMS = (
    Claim(
        "Z1",
        ("S1",),
        "ZeRO: if the model fits, sharding and offload only slow things down",
        "",
        "REFUTED if a rank of ZeRO 3 holds over 60 % of what one of DDP does; CONFIRMED if no way of "
        "sharding is faster than DDP by more than the spread; else DEPENDS",
        _only_slower,
        ("sharding",),
        welcome=("data_parallel",),
        without_gpu="Bytes per rank as on GPUs; times are of processes that share this CPU.",
    ),
)
