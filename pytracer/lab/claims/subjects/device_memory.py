"""What a device holds beyond the tensors: the context, kernels, the cache, the driver's share."""

import multiprocessing
import time
from typing import Any

import torch
from torch import nn

from pytracer.basics.driver import bare_uuid, open_nvml, read_gpus
from pytracer.capture import probe
from pytracer.lab.claims.claim import (
    CONFIRMED,
    DEPENDS,
    REFUTED,
    Measured,
    Statement,
    Verdict,
    confirmed_if,
    mib,
    on_gpu,
)
from pytracer.lab.claims.experiment import Lab, Missing, experiment
from pytracer.lab.claims.subjects import training


class Gauge:
    """Reads NVML's figures of the device in use. The experiments of this file share it."""

    def __init__(self) -> None:
        """Opens NVML.

        Raises:
            Missing: NVML cannot be opened.
        """
        nvml = open_nvml()
        if isinstance(nvml, str):
            raise Missing(f"NVML cannot be read: {nvml}")
        self._nvml, self._uuid = nvml, bare_uuid(str(torch.cuda.get_device_properties(0).uuid))

    def used(self) -> int:
        """Used bytes as nvidia-smi shows them: without the driver's reserve."""
        gpu = self._read()
        return int(gpu["used"]) - (gpu["driver_reserve"] or 0)

    def reserve(self) -> int:
        """The bytes that the driver keeps for itself."""
        return self._read()["driver_reserve"] or 0

    def of_processes(self) -> int | None:
        """The sum over all processes; None where NVML does not know a process's figure."""
        figures = [each["bytes"] for each in self._read()["processes"] or []]
        return None if not figures or None in figures else sum(figures)

    def _read(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        return read_gpus(self._nvml, [self._uuid])[self._uuid]


# ---------------------------------------------------------------------- K1: the context

K1 = Statement(
    "K1",
    sources=("S0", "S1", "S2"),
    quote="kernels can take up 1-2 GB of memory; a tiny tensor: 1343 MB",
)


@experiment("context", gpus=1, seconds=(240, 240))
def context(lab: Lab) -> dict[str, Any]:
    """A tiny tensor, a product and a convolution, with lazy and with eager loading of kernels."""
    figures = {}
    for mode in ("LAZY", "EAGER"):
        for stage in probe.measure(CUDA_MODULE_LOADING=mode)["stages"]:
            figures[f"{mode.lower()}_{stage['up_to']}_bytes"] = stage["device_bytes"]
    return figures


@K1.judged_by(
    "CONFIRMED if a tiny tensor costs 1 to 2 GB with kernels loaded lazily and eagerly; "
    "DEPENDS if with one of them; else REFUTED",
    experiments=("context",),
    without_gpu="Nothing: there is no context without a GPU.",
)
def a_tiny_tensor_costs_a_gigabyte(measured: Measured) -> Verdict:
    """The context must take 1 to 2 GB in both modes of loading."""
    figures = measured["context"]
    of_context = {mode: figures[f"{mode}_context_bytes"] for mode in ("lazy", "eager")}
    with_libraries = {mode: figures[f"{mode}_cudnn_bytes"] for mode in ("lazy", "eager")}
    within = {mode: 1e9 <= size <= 2 * 2**30 for mode, size in of_context.items()}
    text = "; ".join(
        f"{mode} loading: {mib(size)} for a tiny tensor, "
        f"{mib(with_libraries[mode])} with cuBLAS and cuDNN"
        for mode, size in of_context.items()
    )
    if all(within.values()):
        return Verdict(CONFIRMED, text)
    if any(within.values()):
        return Verdict(DEPENDS, text, "CUDA_MODULE_LOADING, which is LAZY since CUDA 12.2")
    return Verdict(REFUTED, text, "neither way of loading takes 1 to 2 GB here")


# ---------------------------------------------------------------------- K2, K4: the weights

K2 = Statement(
    "K2",
    sources=("S0", "S1"),
    quote="loading the model: 1343 to 2631 MB, 1.3 GB",
    arithmetic="1288 MiB, of which 4 B per parameter are 1278.5 and 9.5 are the allocator's",
)


@experiment("weights_load", needs=("transformers",))
def weights_load(lab: Lab) -> dict[str, Any]:
    """Moves BERT-large to the device and reads three counters: trace, allocator and NVML."""
    with torch.device("meta"):
        described = training.model("full")
    tensors = [*described.parameters(), *described.buffers()]
    figures: dict[str, Any] = {
        "bert_large_parameters": sum(p.numel() for p in described.parameters()),
        "bert_large_bytes": sum(x.numel() * x.element_size() for x in tensors),
    }
    if not lab.cuda:
        with lab.traced("load"):
            net = training.model(lab.scale)
            net(torch.randint(100, 1000, (1, 8)))
        return figures | _weights(lab, net)
    net = training.model(lab.scale)
    with lab.traced("load"):
        torch.ones(1, 1, device=lab.device)
        gauge = Gauge()
        used, reserved = gauge.used(), torch.cuda.memory_reserved()
        allocated = torch.cuda.memory_allocated()
        net.to(lab.device)
        figures["allocated_weights"] = torch.cuda.memory_allocated() - allocated
        figures["nvml_delta"] = gauge.used() - used
        figures["reserved_delta"] = torch.cuda.memory_reserved() - reserved
        # The trace learns of a module by its call. The counters are read before that.
        net(torch.randint(100, 1000, (1, 8), device=lab.device))
    return figures | _weights(lab, net)


def _weights(lab: Lab, net: nn.Module) -> dict[str, Any]:
    tensors = [*net.parameters(), *net.buffers()]
    return {
        "weights_traced": lab.traces["load"]["categories"]["weights"]["at_end"],
        "weights_bytes": sum(x.numel() * x.element_size() for x in tensors),
        "parameters": sum(p.numel() for p in net.parameters()),
    }


@K2.judged_by(
    "CONFIRMED if the traced weights are exact, NVML's growth is the allocator's (2 MiB), and "
    "within 1 % of 1288 MiB for BERT-large; else REFUTED",
    experiments=("weights_load",),
    without_gpu="That weights are 4 B per parameter, exactly; not what the allocator adds.",
)
def the_weights_account_for_the_growth(measured: Measured) -> Verdict:
    """The trace, the allocator and NVML must agree on the size of the weights."""
    figures = measured["weights_load"]
    arithmetic = (
        f"BERT-large has {figures['bert_large_parameters']:,} parameters: "
        f"{mib(figures['bert_large_bytes'])} of weights"
    )
    exact = figures["weights_traced"] == figures["weights_bytes"]
    as_computed = abs(figures["bert_large_bytes"] / 2**20 - 1288) <= 0.01 * 1288
    if not on_gpu(figures):
        text = f"{arithmetic}; the scaled-down model's {figures['weights_traced']:,} B are exact"
        because = "of the 1288 MiB, 9 are CUDA's allocator's"
        return confirmed_if(exact and as_computed, text, because)
    rounding = figures["allocated_weights"] - figures["weights_bytes"]
    cached = figures["reserved_delta"] - figures["allocated_weights"]
    text = (
        f"{mib(figures['nvml_delta'])} by NVML = {mib(figures['weights_bytes'])} weights + "
        f"{mib(rounding)} rounding + {mib(cached)} ends of segments"
        f" {figures['nvml_delta'] - figures['reserved_delta']:+,} B"
    )
    # Only the weights arrived meanwhile, so the driver's figure must be the allocator's.
    closes = abs(figures["nvml_delta"] - figures["reserved_delta"]) <= 2 << 20
    scaled_down = figures["weights_bytes"] != figures["bert_large_bytes"]
    as_said = scaled_down or abs(figures["nvml_delta"] / 2**20 - 1288) <= 0.01 * 1288
    return confirmed_if(exact and closes and as_said, text)


# ---------------------------------------------------------------------- K3: nvidia-smi's two figures

K3 = Statement(
    "K3",
    sources=("S1",),
    quote="nvidia-smi: 2631 MiB in all, 2629 MiB for the process",
    arithmetic="2 MiB are the driver's",
)


@experiment("nvml_figures", gpus=1)
def nvml_figures(lab: Lab) -> dict[str, Any]:
    """The device's figure beside those of its processes."""
    kept = torch.ones(256 << 20, dtype=torch.uint8, device=lab.device)
    gauge = Gauge()
    return {
        "tensor_bytes": kept.numel(),
        "device_used": gauge.used(),
        "driver_reserve": gauge.reserve(),
        "processes_used": gauge.of_processes(),
    }


@K3.judged_by(
    "CONFIRMED if device and processes are within 16 MiB; DEPENDS if they are and the driver "
    "also keeps a reserve above that; else REFUTED",
    experiments=("nvml_figures",),
    without_gpu="Nothing: NVML's figures are a GPU's.",
)
def the_processes_account_for_the_device(measured: Measured) -> Verdict:
    """The device's figure must be the sum of its processes' figures."""
    figures = measured["nvml_figures"]
    if figures["processes_used"] is None:
        return Verdict(
            DEPENDS,
            f"the device: {mib(figures['device_used'])}",
            "whether NVML tells of processes; in this container it does not",
        )
    apart = figures["device_used"] - figures["processes_used"]
    reserve = figures["driver_reserve"]
    text = (
        f"device {mib(figures['device_used'])}, its processes {mib(figures['processes_used'])}: "
        f"{mib(apart)} apart, and {mib(reserve)} of the driver's reserve"
    )
    if abs(apart) > 16 << 20:
        return Verdict(REFUTED, text)
    if reserve > 16 << 20:
        return Verdict(DEPENDS, text, "whether a tool counts the driver's reserve as used")
    return Verdict(CONFIRMED, text)


K4 = Statement(
    "K4",
    sources=("S0", "S1", "S2"),
    quote="on newer GPUs a model can sometimes take up more space, since weights are loaded in an "
    "optimized fashion",
)


@K4.judged_by(
    "CONFIRMED if the weights' bytes are over 1 % more than numel x itemsize; else REFUTED",
    experiments=("weights_load",),
    without_gpu="The same arithmetic for the CPU's allocator.",
)
def newer_gpus_need_more_for_weights(measured: Measured) -> Verdict:
    """The weights of K2's experiment must take more than their elements need."""
    figures = measured["weights_load"]
    more = figures["weights_traced"] - figures["weights_bytes"]
    text = f"{figures['weights_traced']:,} B of weights, {more:+,} B against numel x itemsize"
    return confirmed_if(more > 0.01 * figures["weights_bytes"], text)


# ---------------------------------------------------------------------- L4: giving memory back

L4 = Statement(
    "L4",
    sources=("S3",),
    quote="torch.cuda.empty_cache() and killing what was left behind give memory back",
)


@experiment("empty_cache", gpus=1)
def empty_cache(lab: Lab) -> dict[str, Any]:
    """The bytes that empty_cache gives back, and the bytes that killing a process gives back."""
    gauge = Gauge()
    size = 512 << 20
    with lab.traced("cache"):
        kept = torch.empty(size, dtype=torch.uint8, device=lab.device)
        used, reserved = gauge.used(), torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        alive = gauge.used()
        del kept
        freed = gauge.used()
        torch.cuda.empty_cache()
        emptied, left = gauge.used(), torch.cuda.memory_reserved()
    killed = _killed_process(gauge, size)
    return {
        "tensor_bytes": size,
        "given_back_while_alive": used - alive,
        "given_back_by_del": alive - freed,
        "given_back_by_empty_cache": freed - emptied,
        "reserved_given_back": reserved - left,
        **killed,
    }


def _killed_process(gauge: Gauge, size: int) -> dict[str, Any]:
    """What another process held, and what was left of it after it was killed."""
    spawn = multiprocessing.get_context("spawn")
    before, ready = gauge.used(), spawn.Event()
    other = spawn.Process(target=_hold, args=(size, ready), daemon=True)
    other.start()
    if not ready.wait(60):
        other.kill()
        raise RuntimeError("the other process did not come up in 60 s")
    held = gauge.used() - before
    other.kill()
    other.join()
    for _ in range(50):
        if gauge.used() - before < held / 10:
            break
        time.sleep(0.1)
    return {"other_held": held, "other_left": gauge.used() - before}


def _hold(size: int, ready: Any) -> None:
    """Plays a process that somebody forgot to end."""
    kept = torch.ones(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    ready.set()
    time.sleep(600)
    del kept


@L4.judged_by(
    "CONFIRMED if empty_cache gives back what was freed and nothing else, and a killed process "
    "leaves nothing; else REFUTED",
    experiments=("empty_cache",),
    without_gpu="Nothing: the CPU's allocator has no cache of this kind.",
)
def emptying_and_killing_give_memory_back(measured: Measured) -> Verdict:
    """empty_cache must give the whole tensor back, and the killed process nine tenths of its own."""
    figures = measured["empty_cache"]
    size = figures["tensor_bytes"]
    text = (
        f"of {mib(size)}: {mib(figures['given_back_while_alive'])} while the tensor lives, "
        f"{mib(figures['given_back_by_del'])} by del, "
        f"{mib(figures['given_back_by_empty_cache'])} by empty_cache; a process that held "
        f"{mib(figures['other_held'])} left {mib(figures['other_left'])} when killed"
    )
    back = figures["given_back_by_empty_cache"] >= size
    gone = figures["other_held"] >= size and figures["other_left"] <= figures["other_held"] / 10
    return confirmed_if(back and gone and figures["given_back_while_alive"] < size / 10, text)
