"""Every system that the documents name, and the claims that cover it."""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytracer.lab.claims.claim import CONFIRMED, DEPENDS, FAILED, REFUTED, SKIPPED
from pytracer.lab.claims.experiment import how_to_install


@dataclass(frozen=True)
class System:
    """A system: its name, how it is covered, by which claims, and the packages it needs."""

    name: str
    how: str
    claims: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


SYSTEMS = (
    System(
        "Hugging Face Trainer",
        "unmodified under trace(); its callback is pytracer.integrations.transformers",
        ("V1", "V2", "G1", "C1", "F1", "F2", "O4", "O5", "O6", "A2"),
        ("transformers",),
    ),
    System("Accelerate", "the documents' loop, against the Trainer", ("A2",), ("accelerate",)),
    System("datasets", "a list of random sequences stands for it: no downloads", ("V1",)),
    System(
        "NVML, pynvml, nvidia-smi",
        "read beside the allocator; pytracer ledger names other processes",
        ("K1", "K2", "K3", "L4"),
        ("pynvml",),
    ),
    System(
        "CUDA_VISIBLE_DEVICES, several GPUs",
        "devices are known by their UUID, a row each: tests/test_ledger.py",
        ("K3", "Z1"),
    ),
    System(
        "AdamW variants: adamw_hf, adamw_torch, adamw_torch_xla, adamw_apex_fused, _multi_tensor",
        "torch's loop, foreach and fused; adamw_hf is gone from transformers",
        ("O1", "O8", "A1"),
    ),
    System("SGD with momentum", "its state in bytes per parameter", ("O1",)),
    System("Adafactor", "transformers' and torch's, with and without beta1", ("O2", "O4", "O5")),
    System(
        "bitsandbytes", "8-bit states and those that stay in 32", ("O6", "O7"), ("bitsandbytes",)
    ),
    System("apex", "torch's fused AdamW is the same kernel", ("O8",), ("apex",)),
    System("AMP: autocast and GradScaler", "the 16-bit copies and their life", ("A1", "F1", "P1")),
    System("fp32, fp16, bf16, tf32", "ranges, errors, speeds", ("F1", "F3", "F4", "F5", "T1")),
    System("gradient accumulation", "4 of batch size 1; gradients compared", ("G1", "B1")),
    System("gradient checkpointing", "both kinds, and around parts", ("C1", "C2", "C3")),
    System("DataLoader: pin_memory, num_workers", "bandwidth and resident memory", ("D1",)),
    System(
        "DeepSpeed: ZeRO, offload, NVMe",
        "stages 1 to 3 and offload through torch's own; in traces of DeepSpeed itself shards, "
        "masters and buckets are told apart, but no claim is judged by it",
        ("Z1",),
        ("deepspeed",),
    ),
    System(
        "DDP, data parallel, all-reduce", "per rank, with and without views of buckets", ("Z1",)
    ),
    System("FSDP2", "per rank, gathered weights in communication", ("Z1",)),
    System("pipeline and tensor parallel", "not run: a rank of them is traced as any process is"),
    System("mixture of experts: GLaM, DeepSpeed-MoE, Megatron", "a small one with top-1", ("M1",)),
    System(
        "torchdynamo back ends: eager, aot_eager, inductor, nvfuser, aot_nvfuser, aot_cudagraphs, "
        "ofi, fx2trt, onnxrt, ipex",
        "those that exist are run, the others listed",
        ("X1",),
    ),
    System(
        "TorchScript", "the back ends ts and aot_ts are listed; torch has deprecated it", ("X1",)
    ),
    System("TensorRT", "a compiler for inference", ("X1",), ("torch_tensorrt",)),
    System("IPEX", "a back end for Intel's CPUs", ("X1",), ("intel_extension_for_pytorch",)),
    System("beam search, generation", "a decoder with a cache of its own", ("BS",)),
    System("BatchNorm and dropout", "statistics and gradients under checkpoints", ("B1", "C3")),
    System(
        "MMCV: Faster-RCNN, ResNet-34",
        "their accumulation as equality of gradients; the trainings to a score are not repeated",
        ("B1",),
    ),
    System("bert-large", "random weights from its configuration", ("K2", "V1"), ("transformers",)),
    System("t5-3b", "on the meta device", ("O3",), ("transformers",)),
    System("UNet, BERT, tiny feed-forward network", "small ones with random weights", ("P1",)),
    System(
        "K80, V100, A100, RTX 3090, T4",
        "not here: a report is of the device it names; pytracer gemm knows their datasheets",
        ("T1", "F5"),
    ),
    System("NGC containers, CUDA toolkit", "pytracer doctor says what a machine has", ("K1",)),
    System("Colab, kill -9", "needs no root; a killed process's memory is seen to return", ("L4",)),
    System("Data Movement Is All You Need", "its classes of operators", ("R3",)),
)


def found(verdicts: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Each system with its status on this machine, from the verdicts of this run."""
    for system in SYSTEMS:
        yield {
            "name": system.name,
            "how": system.how,
            "claims": list(system.claims),
            "status": _status(system, verdicts),
        }


def _status(system: System, verdicts: Mapping[str, str]) -> str:
    absent = [name for name in system.packages if importlib.util.find_spec(name) is None]
    if absent:
        return f"SKIPPED: not installed: {', '.join(map(how_to_install, absent))}"
    if not system.claims:
        return "described"
    judged = [c for c in system.claims if verdicts.get(c) in (CONFIRMED, REFUTED, DEPENDS)]
    if judged:
        return "measured" if len(judged) == len(system.claims) else f"measured: {', '.join(judged)}"
    for verdict in (FAILED, SKIPPED):
        if verdict in map(verdicts.get, system.claims):
            return verdict
    return "not in this run"
