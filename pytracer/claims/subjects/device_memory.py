"""What a device holds beyond the tensors: context, kernels, the cache; and how data get there."""

import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytracer.capture import probe
from pytracer.capture.device_memory import read_host
from pytracer.claims.claim import (
    CONFIRMED,
    DEPENDS,
    REFUTED,
    Claim,
    Measured,
    Verdict,
    confirmed_if,
    mib,
    on_gpu,
    ranged,
)
from pytracer.claims.experiment import Lab, Missing, experiment, ratio, spread
from pytracer.claims.subjects import training_table
from pytracer.driver import bare_uuid, open_nvml, read_gpus

# ---------------------------------------------------------------------- experiments


@experiment("context", gpus=1, seconds=(240, 240))
def context(lab: Lab) -> dict[str, Any]:
    """A tiny tensor, a product and a convolution, with kernels loaded lazily and eagerly."""
    found = {}
    for mode in ("LAZY", "EAGER"):
        for stage in probe.measure(CUDA_MODULE_LOADING=mode)["stages"]:
            found[f"{mode.lower()}_{stage['up_to']}_bytes"] = stage["device_bytes"]
    return found


class Gauge:
    """NVML's figures of the device that is used here."""

    def __init__(self) -> None:
        """Needs NVML."""
        nvml = open_nvml()
        if isinstance(nvml, str):
            raise Missing(f"NVML cannot be read: {nvml}")
        self._nvml, self._uuid = nvml, bare_uuid(str(torch.cuda.get_device_properties(0).uuid))

    def used(self) -> int:
        """As nvidia-smi shows it: the driver's reserve apart."""
        gpu = self._look()
        return int(gpu["used"]) - (gpu["driver_reserve"] or 0)

    def reserve(self) -> int:
        """What the driver keeps for itself."""
        return self._look()["driver_reserve"] or 0

    def of_processes(self) -> int | None:
        """The sum of all processes' figures; None where NVML does not tell."""
        figures = [each["bytes"] for each in self._look()["processes"] or []]
        return None if not figures or None in figures else sum(figures)

    def _look(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        return read_gpus(self._nvml, [self._uuid])[self._uuid]


@experiment("weights_load", needs=("transformers",))
def weights_load(lab: Lab) -> dict[str, Any]:
    """BERT-large goes to the device: what each of the three counters says of it."""
    with torch.device("meta"):
        described = training_table.model("full")
    tensors = [*described.parameters(), *described.buffers()]
    found: dict[str, Any] = {
        "bert_large_parameters": sum(p.numel() for p in described.parameters()),
        "bert_large_bytes": sum(x.numel() * x.element_size() for x in tensors),
    }
    if not lab.cuda:
        with lab.traced("load"):
            net = training_table.model(lab.scale)
            net(torch.randint(100, 1000, (1, 8)))
        return found | _weights(lab, net)
    net = training_table.model(lab.scale)
    with lab.traced("load"):
        torch.ones(1, 1, device=lab.device)
        gauge = Gauge()
        used, reserved = gauge.used(), torch.cuda.memory_reserved()
        allocated = torch.cuda.memory_allocated()
        net.to(lab.device)
        found["allocated_weights"] = torch.cuda.memory_allocated() - allocated
        found["nvml_delta"] = gauge.used() - used
        found["reserved_delta"] = torch.cuda.memory_reserved() - reserved
        # Modules are known when they are called; the process's other memory is read by then.
        net(torch.randint(100, 1000, (1, 8), device=lab.device))
    return found | _weights(lab, net)


def _weights(lab: Lab, net: nn.Module) -> dict[str, Any]:
    tensors = [*net.parameters(), *net.buffers()]
    return {
        "weights_traced": lab.traces["load"]["categories"]["weights"]["at_end"],
        "weights_bytes": sum(x.numel() * x.element_size() for x in tensors),
        "parameters": sum(p.numel() for p in net.parameters()),
    }


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


@experiment("empty_cache", gpus=1)
def empty_cache(lab: Lab) -> dict[str, Any]:
    """What empty_cache gives back, and what a process that is killed does."""
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
    """A process that was forgotten."""
    kept = torch.ones(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    ready.set()
    time.sleep(600)
    del kept


class _Images(torch.utils.data.Dataset[torch.Tensor]):
    """Each takes some work to make."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        made = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(index))
        return made.sin().cos().exp().tanh()


def _loader(count: int, workers: int) -> Any:
    return torch.utils.data.DataLoader(
        _Images(count), batch_size=16, num_workers=workers, persistent_workers=workers > 0
    )


@experiment("data_loader")
def data_loader(lab: Lab) -> dict[str, Any]:
    """Worker processes: what they take and what they give; on a GPU also pinned memory."""
    workers = min(4, len(os.sched_getaffinity(0)))
    count = lab.pick(1024, 8192)
    loaders = {number: _loader(count, number) for number in (0, workers)}
    taken: dict[int, list[float]] = {number: [] for number in loaders}
    for turn in range(6):
        for number, loader in loaders.items():
            begin = time.perf_counter()
            for _batch in loader:
                pass
            if turn:  # in the first the workers come up
                taken[number].append(time.perf_counter() - begin)
    resident = [_resident(worker.pid) for worker in loaders[workers]._iterator._workers]
    found: dict[str, Any] = {"workers": workers, "cores": len(os.sched_getaffinity(0))}
    found |= ratio("faster_with_workers", taken[0], taken[workers])
    found["worker_bytes"] = int(statistics.median(resident))
    found["own_bytes"] = read_host().get("resident", 0)
    return found | (_pinned(lab) if lab.cuda else {})


def _resident(pid: int) -> int:
    """What is this process's alone: pages that it shares with its parent are not its cost."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        wanted = "Private_"
    except OSError:  # some containers' kernels do not tell; then all of it
        lines, wanted = Path(f"/proc/{pid}/status").read_text().splitlines(), "VmRSS"
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))


def _pinned(lab: Lab) -> dict[str, Any]:
    size = 256 << 20
    plain = torch.empty(size, dtype=torch.uint8)
    plain.fill_(1)
    fixed = plain.pin_memory()
    taken = lab.alternating(
        {
            "plain": lambda: plain.to(lab.device),
            "pinned": lambda: fixed.to(lab.device, non_blocking=True),
        }
    )
    found = spread("pinned_bytes_per_s", [size / each for each in taken["pinned"]])
    found |= spread("plain_bytes_per_s", [size / each for each in taken["plain"]])
    return found | ratio("faster_when_pinned", taken["plain"], taken["pinned"])


# ---------------------------------------------------------------------- verdicts


def _context(measured: Measured) -> Verdict:
    found = measured["context"]
    sizes = {mode: found[f"{mode}_context_bytes"] for mode in ("lazy", "eager")}
    all_of_it = {mode: found[f"{mode}_cudnn_bytes"] for mode in ("lazy", "eager")}
    within = {mode: 1e9 <= size <= 2 * 2**30 for mode, size in sizes.items()}
    text = "; ".join(
        f"{mode} loading: {mib(size)} for a tiny tensor, {mib(all_of_it[mode])} with cuBLAS and cuDNN"
        for mode, size in sizes.items()
    )
    if all(within.values()):
        return Verdict(CONFIRMED, text)
    if any(within.values()):
        return Verdict(DEPENDS, text, "CUDA_MODULE_LOADING, which is LAZY since CUDA 12.2")
    return Verdict(REFUTED, text, "neither way of loading takes 1 to 2 GB here")


def _weights_account(measured: Measured) -> Verdict:
    found = measured["weights_load"]
    arithmetic = (
        f"BERT-large has {found['bert_large_parameters']:,} parameters: "
        f"{mib(found['bert_large_bytes'])} of weights"
    )
    exact = found["weights_traced"] == found["weights_bytes"]
    near = abs(found["bert_large_bytes"] / 2**20 - 1288) <= 0.01 * 1288
    if not on_gpu(found):
        text = f"{arithmetic}; the scaled-down model's {found['weights_traced']:,} B are exact"
        return confirmed_if(exact and near, text, "of the 1288 MiB, 9 are CUDA's allocator's")
    rounding = found["allocated_weights"] - found["weights_bytes"]
    cached = found["reserved_delta"] - found["allocated_weights"]
    text = (
        f"{mib(found['nvml_delta'])} by NVML = {mib(found['weights_bytes'])} weights + "
        f"{mib(rounding)} rounding + {mib(cached)} ends of segments"
        f" {found['nvml_delta'] - found['reserved_delta']:+,} B"
    )
    # Where nothing but the weights came, the driver's figure is the allocator's.
    closes = abs(found["nvml_delta"] - found["reserved_delta"]) <= 2 << 20
    documents_size = found["weights_bytes"] != found["bert_large_bytes"]
    as_said = documents_size or abs(found["nvml_delta"] / 2**20 - 1288) <= 0.01 * 1288
    return confirmed_if(exact and closes and as_said, text)


def _two_figures(measured: Measured) -> Verdict:
    found = measured["nvml_figures"]
    if found["processes_used"] is None:
        return Verdict(
            DEPENDS,
            f"the device: {mib(found['device_used'])}",
            "whether NVML tells of processes; in this container it does not",
        )
    apart, reserve = found["device_used"] - found["processes_used"], found["driver_reserve"]
    text = (
        f"device {mib(found['device_used'])}, its processes {mib(found['processes_used'])}: "
        f"{mib(apart)} apart, and {mib(reserve)} of the driver's reserve"
    )
    if abs(apart) > 16 << 20:
        return Verdict(REFUTED, text)
    if reserve > 16 << 20:
        return Verdict(DEPENDS, text, "whether a tool counts the driver's reserve as used")
    return Verdict(CONFIRMED, text)


def _more_on_newer(measured: Measured) -> Verdict:
    found = measured["weights_load"]
    more = found["weights_traced"] - found["weights_bytes"]
    text = f"{found['weights_traced']:,} B of weights, {more:+,} B against numel x itemsize"
    return confirmed_if(more > 0.01 * found["weights_bytes"], text)


def _emptying(measured: Measured) -> Verdict:
    found = measured["empty_cache"]
    size = found["tensor_bytes"]
    text = (
        f"of {mib(size)}: {mib(found['given_back_while_alive'])} while the tensor lives, "
        f"{mib(found['given_back_by_del'])} by del, "
        f"{mib(found['given_back_by_empty_cache'])} by empty_cache; a process that held "
        f"{mib(found['other_held'])} left {mib(found['other_left'])} when killed"
    )
    back = found["given_back_by_empty_cache"] >= size
    gone = found["other_held"] >= size and found["other_left"] <= found["other_held"] / 10
    return confirmed_if(back and gone and found["given_back_while_alive"] < size / 10, text)


def _loading(measured: Measured) -> Verdict:
    found = measured["data_loader"]
    faster, workers = found["faster_with_workers"], found["workers"]
    times = ranged(found, "faster_with_workers")
    text = f"{workers} workers load {times}x as fast, with {mib(found['worker_bytes'])} each"
    if "faster_when_pinned" in found:
        text += (
            f"; pinned {found['pinned_bytes_per_s'] / 1e9:.1f} GB/s, "
            f"{ranged(found, 'faster_when_pinned')}x pageable"
        )
        return confirmed_if(faster >= 1.2 and found["faster_when_pinned"] >= 1.2, text)
    free = f"free cores, of which there are at most {found['cores']}, and a GPU to copy to"
    return Verdict(DEPENDS, text, free)


CLAIMS = (
    Claim(
        "K1",
        ("S0", "S1", "S2"),
        "kernels can take up 1-2 GB of memory; a tiny tensor: 1343 MB",
        "",
        "CONFIRMED if a tiny tensor costs 1 to 2 GB with kernels loaded lazily and eagerly; "
        "DEPENDS if with one of them; else REFUTED",
        _context,
        ("context",),
        without_gpu="Nothing: there is no context without a GPU.",
    ),
    Claim(
        "K2",
        ("S0", "S1"),
        "loading the model: 1343 to 2631 MB, 1.3 GB",
        "1288 MiB, of which 4 B per parameter are 1278.5 and 9.5 are the allocator's",
        "CONFIRMED if the traced weights are exact, NVML's growth is the allocator's (2 MiB), and "
        "within 1 % of 1288 MiB for BERT-large; else REFUTED",
        _weights_account,
        ("weights_load",),
        without_gpu="That weights are 4 B per parameter, exactly; not what the allocator adds.",
    ),
    Claim(
        "K3",
        ("S1",),
        "nvidia-smi: 2631 MiB in all, 2629 MiB for the process",
        "2 MiB are the driver's",
        "CONFIRMED if device and processes are within 16 MiB; DEPENDS if they are and the driver "
        "also keeps a reserve above that; else REFUTED",
        _two_figures,
        ("nvml_figures",),
        without_gpu="Nothing: NVML's figures are a GPU's.",
    ),
    Claim(
        "K4",
        ("S0", "S1", "S2"),
        "on newer GPUs a model can sometimes take up more space, since weights are loaded in an "
        "optimized fashion",
        "",
        "CONFIRMED if the weights' bytes are over 1 % more than numel x itemsize; else REFUTED",
        _more_on_newer,
        ("weights_load",),
        without_gpu="The same arithmetic for the CPU's allocator.",
    ),
    Claim(
        "L4",
        ("S3",),
        "torch.cuda.empty_cache() and killing what was left behind give memory back",
        "",
        "CONFIRMED if empty_cache gives back what was freed and nothing else, and a killed process "
        "leaves nothing; else REFUTED",
        _emptying,
        ("empty_cache",),
        without_gpu="Nothing: the CPU's allocator has no cache of this kind.",
    ),
    Claim(
        "D1",
        ("S1",),
        "pin_memory=True and num_workers=4: faster loading",
        "",
        "CONFIRMED if workers load at least 1.2x as fast and pinned memory is copied at least "
        "1.2x as fast; REFUTED if either is not; DEPENDS where there is no GPU to copy to",
        _loading,
        ("data_loader",),
        without_gpu="Workers' speed and memory; not pinned copies.",
    ),
)
