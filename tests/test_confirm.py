"""`pytracer confirm`: every claim has a row, verdicts follow from measurements, failures cost a row."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytracer import errors
from pytracer.cli import main
from pytracer.lab.claims import catalog, commands, report, runner, systems, worker
from pytracer.lab.claims.claim import (
    CONFIRMED,
    DEPENDS,
    FAILED,
    REFUTED,
    SKIPPED,
    SOURCES,
    Claim,
    Verdict,
)
from pytracer.lab.claims.experiment import EXPERIMENTS, Experiment, Lab, Missing

# As the documents' facts number their claims.
IDS = [
    "K1",
    "K2",
    "K3",
    "K4",
    "V1",
    "V2",
    "G1",
    "C1",
    "C2",
    "C3",
    "F1",
    "F2",
    "F3",
    "F4",
    "F5",
    "O1",
    "O2",
    "O3",
    "O4",
    "O5",
    "O6",
    "O7",
    "O8",
    "A1",
    "A2",
    "R1",
    "R2",
    "R3",
    "T1",
    "M1",
    "P1",
    "B1",
    "L1",
    "L2",
    "L3",
    "L4",
    "D1",
    "Z1",
    "X1",
    "BS",
]

# Words that the documents name systems by; each has to be in the name of one that is covered.
NAMED = [
    "Trainer",
    "Accelerate",
    "datasets",
    "pynvml",
    "nvidia-smi",
    "CUDA_VISIBLE_DEVICES",
    "several GPUs",
    "adamw_hf",
    "adamw_torch",
    "_xla",
    "apex_fused",
    "SGD with momentum",
    "Adafactor",
    "_multi_tensor",
    "bitsandbytes",
    "apex",
    "autocast",
    "GradScaler",
    "fp32",
    "fp16",
    "bf16",
    "tf32",
    "gradient accumulation",
    "gradient checkpointing",
    "pin_memory",
    "num_workers",
    "DeepSpeed",
    "ZeRO",
    "offload",
    "NVMe",
    "DDP",
    "data parallel",
    "all-reduce",
    "pipeline",
    "tensor parallel",
    "GLaM",
    "DeepSpeed-MoE",
    "Megatron",
    "aot_eager",
    "inductor",
    "nvfuser",
    "aot_nvfuser",
    "aot_cudagraphs",
    "ofi",
    "fx2trt",
    "onnxrt",
    "ipex",
    "TorchScript",
    "TensorRT",
    "IPEX",
    "beam search",
    "generation",
    "BatchNorm",
    "dropout",
    "MMCV",
    "bert-large",
    "t5-3b",
    "UNet",
    "BERT",
    "tiny feed-forward",
    "ResNet-34",
    "Faster-RCNN",
    "K80",
    "V100",
    "A100",
    "RTX 3090",
    "T4",
    "NGC",
    "CUDA toolkit",
    "Colab",
    "kill -9",
    "Data Movement Is All You Need",
]

GPU = {"device": "cuda", "scale": "full"}
MIB = 1 << 20


def training(**more: Any) -> dict[str, Any]:
    """A row of the documents' table."""
    names = ("weights", "gradients", "optimizer_state", "activations", "temporaries", "inputs")
    row: dict[str, Any] = dict.fromkeys([f"{n}_bytes" for n in names], 0)
    row |= {"weights_most": 4000, "gradients_most": 4000, "optimizer_state_most": 8000}
    row |= {"parameters": 1000, "batch": 4, "activations_most": 8000, "activations_bytes": 8000}
    row |= {"peak_bytes": 24000, "samples_per_s": 10.0, "step_s": 0.4, "nvml_used": 25000}
    return row | {"reserved_peak": 13606 * MIB} | more


PLAIN = training()
BY_STEP = training(peak_bytes=14000, batch=1, activations_most=2000, step_s=0.5)
RECOMPUTED = training(peak_bytes=12000, batch=1, activations_most=500, step_s=0.6)
HALF = training(peak_bytes=23000, samples_per_s=20.0, weights_most=6000)
ALL = training(peak_bytes=11500, samples_per_s=12.0)
LIGHT = training(peak_bytes=16000, optimizer_state_most=0)
SMALLEST = training(peak_bytes=7800, optimizer_state_most=0)
EIGHT_BIT = training(peak_bytes=18000, optimizer_state_most=2100)
TABLE = {
    "trainer_vanilla": PLAIN,
    "trainer_accumulation": BY_STEP,
    "trainer_checkpointing": RECOMPUTED,
    "trainer_fp16": HALF,
    "trainer_all": ALL,
    "trainer_adafactor": LIGHT,
    "trainer_all_adafactor": SMALLEST,
    "trainer_8bit": EIGHT_BIT,
    "trainer_all_8bit": SMALLEST,
    "accelerate_all": ALL,
}
CONTEXT = {
    f"{mode}_{stage}_bytes": 1343 * MIB
    for mode in ("lazy", "eager")
    for stage in ("context", "cudnn")
}
WEIGHTS = {
    "bert_large_parameters": 335_143_938,
    "bert_large_bytes": 1_340_583_944,
    "weights_traced": 1_340_583_944,
    "weights_bytes": 1_340_583_944,
    "allocated_weights": 1_340_700_000,
    "reserved_delta": 1288 * MIB,
    "nvml_delta": 1288 * MIB,
}
NVML = {"device_used": 2631 * MIB, "processes_used": 2629 * MIB, "driver_reserve": 0}
CACHE = {
    "tensor_bytes": 512 * MIB,
    "given_back_while_alive": 0,
    "given_back_by_del": 0,
    "given_back_by_empty_cache": 512 * MIB,
    "other_held": 900 * MIB,
    "other_left": 0,
}
LOADING = {
    "faster_with_workers": 3.0,
    "workers": 4,
    "worker_bytes": 20 * MIB,
    "faster_when_pinned": 2.0,
    "pinned_bytes_per_s": 5e10,
}
EIGHTEEN = {
    f"{way}_{name}": size
    for way in ("fp32", "autocast", "master", "inference")
    for name, size in (
        ("weights", 6.0),
        ("gradients", 4.0),
        ("optimizer_state", 8.0),
        ("held", 18.0),
    )
}
STATES = {"adamw": 8.0, "sgd": 0.0, "sgd_momentum": 4.0, "adam8bit": 2.02}
STATES |= {"adafactor": 4.2, "adafactor_torch": 4.2, "adafactor_beta1": 4.2}
SPEEDS = {f"{n}_{what}": 1.0 for n in ("loop", "foreach", "fused") for what in ("s", "temporaries")}
SPEEDS |= {"fused_faster_than_foreach": 2.0, "fused_faster_than_foreach_low": 1.5}
SPEEDS |= {"foreach_faster_than_loop": 1.5}
GRADIENTS = {"plain_2": 1e-16, "plain_4": 1e-16, "normalised_2": 0.5, "normalised_4": 0.9}
CURVE = {
    "plain_peak": 10972 * MIB,
    "checkpointed_peak": 3944 * MIB,
    "plain_activations": 9000 * MIB,
    "checkpointed_activations": 2000 * MIB,
    "larger_peak": 10212 * MIB,
    "larger_batch": 132,
    "batch": 24,
    "slower": 1.36,
    "larger_samples_per_s": 118.0,
    "checkpointed_samples_per_s": 100.0,
}
CAUTIONS = {
    "reentrant_first_saved": 0,
    "reentrant_first_learns": True,
    "not_reentrant_first_saved": 0,
    "dropout_same_kept": False,
    "batch_norm_updates": 2,
}
TF32 = {"faster": 3.0, "tf32_tflops": 300, "fp32_tflops": 100, "size": 8192, "bits_kept": 10}
TF32 |= {"tf32_error": 1e-4, "fp32_error": 1e-7}
AMPERE = {"name": "A100", "capability": 8.0, "bf16": True, "tf32_rounds": True}
LEAK = {
    f"{where}_{label}_{what}": value
    for where in ("after_backward", "no_backward")
    for label, grown in (("tensor", 512), ("item", 0), ("detach", 0))
    for what, value in (("growth", grown), ("line", "train.py:4" if grown else ""))
}
LEAK |= {"host_tensor_growth": 7000.0, "host_item_growth": 0.0}
NAMES = {"intermediate_bytes": 100, "intermediates": 6}
NAMES |= {f"{how}_own_names": 700 for how in ("recording", "not_recording")}
NAMES |= {f"{how}_one_name": 300 for how in ("recording", "not_recording")}
VALIDATION = {
    "recording_activations": 100,
    "no_grad_activations": 0,
    "recording_peak": 300,
    "no_grad_peak": 200,
}
LAYERS = {
    f"{kind}_{what}": value
    for kind in ("linear", "conv")
    for what, value in (
        ("flop_ratios", [2.0]),
        ("first_flop_ratio", 1.0),
        ("time_ratio", 2.1),
    )
}
FUNCTIONS = {
    f"{n}_{r}_ratio": 1.5
    for n in ("relu", "gelu", "softmax", "layer_norm")
    for r in ("byte", "time")
}
CLASSES = {
    f"{name}_{what}": value
    for name, values in {
        "contraction": (0.998, 0.61, 100.0),
        "normalisation": (0.0017, 0.255, 1.0),
        "element_wise": (0.0003, 0.135, 0.2),
    }.items()
    for what, value in zip(("flop_share", "time_share", "flops_per_byte"), values, strict=True)
}
ALIGNED = {"size": 4096, "dtype": "bf16"}
ALIGNED |= {f"multiple_of_{m}_slower": s for m, s in ((8, 1.03), (4, 2.9), (2, 5.0), (1, 6.0))}
AUTOCAST = {
    f"{name}_{what}": value
    for name, faster in (("tiny", 0.93), ("unet", 1.4), ("bert", 2.5))
    for what, value in (("faster", faster), ("plain_peak", 100), ("mixed_peak", 80))
} | {"widths": [64], "width_64_faster_low": 0.8}
BACKENDS = {"gone": [], "plain_peak": 100}
BACKENDS |= {f"{n}_faster": 1.0 for n in ("eager", "aot_eager", "inductor")}
BACKENDS |= {f"{n}_peak": 100 for n in ("eager", "aot_eager", "inductor")}
EXPERTS = {
    f"{kind}_{name}_most": size * times
    for kind, times in (("dense", 1), ("mixture", 8))
    for name, size in (("weights", 4), ("gradients", 4), ("optimizer_state", 8))
} | {"dense_activations_most": 100, "mixture_activations_most": 105, "experts": 8}
EXPERTS |= {"mixture_slower": 1.4, "busiest_share": 0.15}
BEAMS = {"counts": [1, 2, 4, 8]}
BEAMS |= {f"beams_{c}_{what}": 100 * c for c in (1, 2, 4, 8) for what in ("held", "functional")}
SHARDED: dict[str, Any] = {
    "where": "2 GPUs",
    "lost": {},
    "parameters": 100,
    "ddp_communication_most": 400,
}
SHARDED |= {"ddp_bucket_view_communication_most": 0}
SHARDED |= {
    f"{way}_{what}": value
    for way, held, time in (("ddp", 1600, 1.0), ("zero1", 1200, 1.1), ("zero3", 800, 1.3))
    for what, value in (("held", held), ("s", time), ("s_low", time), ("s_high", time))
}

# For each claim: measurements that confirm it, and what of them to exchange so that they refute it.
EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "K1": ({"context": CONTEXT}, {"context": dict.fromkeys(CONTEXT, 500 * MIB)}),
    "K2": ({"weights_load": WEIGHTS}, {"weights_load": {"nvml_delta": 1400 * MIB}}),
    "K3": ({"nvml_figures": NVML}, {"nvml_figures": {"processes_used": 2000 * MIB}}),
    "K4": (
        {"weights_load": WEIGHTS | {"weights_traced": 1_400_000_000}},
        {"weights_load": {"weights_traced": 1_340_583_944}},
    ),
    "L4": ({"empty_cache": CACHE}, {"empty_cache": {"given_back_by_empty_cache": 0}}),
    "D1": ({"data_loader": LOADING}, {"data_loader": {"faster_with_workers": 1.0}}),
    "V1": (TABLE, {"trainer_vanilla": {"optimizer_state_most": 4000}}),
    "V2": (
        TABLE | {"trainer_vanilla": training(reserved_peak=11574 * MIB)},
        {"trainer_vanilla": {"optimizer_state_most": 4000}},
    ),
    "G1": (TABLE, {"trainer_accumulation": {"activations_most": 3000}}),
    "C1": (TABLE, {"trainer_checkpointing": {"step_s": 0.65}}),
    "F1": (TABLE, {"trainer_fp16": {"samples_per_s": 11.0}}),
    "F2": (TABLE, {"trainer_all": {"peak_bytes": 20000}}),
    "O4": (TABLE, {"trainer_adafactor": {"optimizer_state_most": 8000}}),
    "O5": (TABLE, {"trainer_all_adafactor": {"peak_bytes": 20000}}),
    "O6": (TABLE, {"trainer_8bit": {"optimizer_state_most": 5000}}),
    "A2": (TABLE, {"accelerate_all": {"gradients_bytes": 400}}),
    "A1": (
        {"bytes_per_parameter": EIGHTEEN},
        {"bytes_per_parameter": {"autocast_weights": 4.0}},
    ),
    "O1": ({"optimizer_state": STATES}, {"optimizer_state": {"sgd_momentum": 8.0}}),
    "O2": ({"optimizer_state": STATES}, {"optimizer_state": {"adafactor": 0.02}}),
    "O3": (
        {"t5_3b": {"parameters": 2_851_598_336}, "optimizer_state": STATES},
        {"optimizer_state": {"adamw": 4.0}},
    ),
    "O7": (
        {
            "eight_bit_state": {
                "adamw": 8.0,
                "adam8bit": 2.03,
                "tensors_in_32_bits": 3,
                "largest_in_32_bits": 4096,
            }
        },
        {"eight_bit_state": {"adam8bit": 4.0}},
    ),
    "O8": (
        {"optimizer_speed": SPEEDS},
        {
            "optimizer_speed": {
                "fused_faster_than_foreach": 0.9,
                "fused_faster_than_foreach_low": 0.8,
                "foreach_faster_than_loop": 1.0,
            }
        },
    ),
    "B1": ({"accumulated_gradients": GRADIENTS}, {"accumulated_gradients": {"plain_4": 0.1}}),
    "C2": ({"checkpoint_curve": CURVE}, {"checkpoint_curve": {"checkpointed_peak": 10000 * MIB}}),
    "C3": (
        {"checkpoint_cautions": CAUTIONS},
        {
            "checkpoint_cautions": {
                "reentrant_first_saved": 100,
                "not_reentrant_first_saved": 100,
                "dropout_same_kept": True,
                "batch_norm_updates": 1,
            }
        },
    ),
    "F3": (
        {"number_formats": {"fp16_max": 65535.0, "bf16_max": 3.39e38}},
        {"number_formats": {"fp16_max": 65504.0}},
    ),
    "F4": ({"tf32_products": TF32}, {"tf32_products": {"bits_kept": 23}}),
    "F5": ({"capability": AMPERE}, {"capability": {"capability": 7.0}}),
    "L1": ({"total_loss": LEAK}, {"total_loss": {"no_backward_item_growth": 512}}),
    "L2": (
        {"names_of_intermediates": NAMES},
        {"names_of_intermediates": {"not_recording_one_name": 700}},
    ),
    "L3": ({"validation": VALIDATION}, {"validation": {"no_grad_activations": 100}}),
    "R1": ({"layer_cost": LAYERS}, {"layer_cost": {"conv_flop_ratios": [65.0]}}),
    "R2": ({"activation_cost": FUNCTIONS}, {"activation_cost": {"gelu_byte_ratio": 2.4}}),
    "R3": ({"operator_classes": CLASSES}, {"operator_classes": {"contraction_flop_share": 0.5}}),
    "T1": ({"alignment": ALIGNED}, {"alignment": {"multiple_of_1_slower": 1.0}}),
    "P1": ({"autocast_models": AUTOCAST}, {"autocast_models": {"tiny_faster": 1.5}}),
    "X1": ({"backends": BACKENDS}, {"backends": {"aot_eager_faster": 1.5}}),
    "M1": ({"experts": EXPERTS}, {"experts": {"mixture_weights_most": 4}}),
    "BS": ({"beams": BEAMS}, {"beams": {"beams_8_held": 100}}),
    "Z1": ({"sharding": SHARDED}, {"sharding": {"zero3_held": 1600}}),
}

# What is neither so nor not so, where the rule knows such a thing.
BETWEEN: dict[str, dict[str, Any]] = {
    "K1": {"context": {"lazy_context_bytes": 500 * MIB}},
    "K3": {"nvml_figures": {"driver_reserve": 600 * MIB}},
    "C1": {"trainer_checkpointing": {"scale": "small"}},
    "V1": {"trainer_vanilla": {"reserved_peak": 9000 * MIB}},
    "V2": {"trainer_vanilla": {"reserved_peak": 9000 * MIB}},
    "F1": {"trainer_fp16": {"device": "cpu"}},
    "F2": {"trainer_all": {"device": "cpu"}},
    "O5": {"trainer_all_adafactor": {"peak_bytes": 12000}},
    "A1": {"bytes_per_parameter": {"autocast_held": 16.0}},
    "O3": {"optimizer_state": {"adafactor": 0.02}},
    "O8": {"optimizer_speed": {"foreach_faster_than_loop": 1.0}},
    "C2": {"checkpoint_curve": {"larger_samples_per_s": 100.0}},
    "C3": {"checkpoint_cautions": {"dropout_same_kept": True}},
    "F4": {"tf32_products": {"faster": 7.0}},
    "L1": {"total_loss": {"after_backward_tensor_growth": 0}},
    "L2": {"names_of_intermediates": {"recording_one_name": 700}},
    "R1": {"layer_cost": {"linear_time_ratio": 1.2}},
    "R2": {"activation_cost": {"relu_time_ratio": 0.6}},
    "T1": {"alignment": {"multiple_of_8_slower": 1.4}},
    "P1": {"autocast_models": {"device": "cpu"}},
    "X1": {"backends": {"gone": ["nvfuser"]}},
    "Z1": {"sharding": {"zero1_s": 0.5, "zero1_s_low": 0.5, "zero1_s_high": 0.5}},
}


def on_gpu(measured: dict[str, Any], changed: dict[str, Any] | None = None) -> dict[str, Any]:
    """As the runner hands them to a judge, some figures exchanged."""
    changed = changed or {}
    return {name: {**GPU, **figures, **changed.get(name, {})} for name, figures in measured.items()}


def claim(name: str) -> Claim:
    return catalog.chosen([name])[0]


# ---------------------------------------------------------------------- the catalogue


def test_every_claim_of_the_documents_has_an_entry() -> None:
    assert sorted(c.id for c in catalog.CLAIMS) == sorted(IDS)


@pytest.mark.parametrize("name", NAMED)
def test_every_system_that_the_documents_name_has_an_entry(name: str) -> None:
    assert any(name in system.name for system in systems.SYSTEMS)


def test_systems_name_claims_that_there_are_and_what_is_not_installed(monkeypatch) -> None:
    monkeypatch.setattr(systems.importlib.util, "find_spec", lambda name: None)
    shown = {system["name"]: system for system in systems.found({})}
    for system in shown.values():
        assert set(system["claims"]) <= set(IDS)
    assert shown["apex"]["status"] == "SKIPPED: not installed: pip install apex"
    assert "pip install nvidia-ml-py" in shown["NVML, pynvml, nvidia-smi"]["status"]


def test_a_system_is_measured_only_as_far_as_its_claims_were_judged(monkeypatch) -> None:
    """Whoever confirms one claim is not told that all systems were measured."""
    monkeypatch.setattr(systems.importlib.util, "find_spec", lambda name: name)

    def status(verdicts: dict[str, str], name: str) -> str:
        return next(s["status"] for s in systems.found(verdicts) if s["name"] == name)

    assert status({"F3": REFUTED}, "Accelerate") == "not in this run"
    assert status({"F3": REFUTED}, "fp32, fp16, bf16, tf32") == "measured: F3"
    assert status({"A2": SKIPPED}, "Accelerate") == "SKIPPED"
    assert status({"A2": FAILED}, "Accelerate") == "FAILED"
    assert status({"A2": CONFIRMED}, "Accelerate") == "measured"
    assert status({}, "pipeline and tensor parallel") == "described"


@pytest.mark.parametrize("each", catalog.CLAIMS, ids=lambda c: c.id)
def test_a_claim_says_where_it_is_from_how_it_is_judged_and_what_measures_it(each: Claim) -> None:
    assert each.quote
    assert set(each.sources) <= {"S0", "S1", "S2", "S3", "S4"}
    assert each.sources
    assert "CONFIRMED" in each.rule or each.rule.startswith("as V1")
    assert each.without_gpu
    assert each.experiments
    assert {*each.experiments, *each.welcome} <= EXPERIMENTS.keys()


def test_every_experiment_is_read_by_a_claim() -> None:
    read = {name for each in catalog.CLAIMS for name in (*each.experiments, *each.welcome)}
    assert read == EXPERIMENTS.keys()


# ---------------------------------------------------------------------- the judges


@pytest.mark.parametrize("name", IDS)
def test_a_measurement_that_confirms_a_claim_confirms_it(name: str) -> None:
    found = claim(name).judge(on_gpu(EXAMPLES[name][0]))
    assert found.verdict == CONFIRMED, found
    assert found.measured


@pytest.mark.parametrize("name", IDS)
def test_a_measurement_that_refutes_a_claim_refutes_it(name: str) -> None:
    confirming, changed = EXAMPLES[name]
    found = claim(name).judge(on_gpu(confirming, changed))
    assert found.verdict == REFUTED, found


@pytest.mark.parametrize("name", sorted(BETWEEN))
def test_what_a_claim_depends_on_is_named(name: str) -> None:
    found = claim(name).judge(on_gpu(EXAMPLES[name][0], BETWEEN[name]))
    assert found.verdict == DEPENDS, found
    assert found.because


@pytest.mark.parametrize(
    ("name", "slow", "experiment", "figure", "full", "not_so"),
    [
        ("C1", {"trainer_checkpointing": {"step_s": 0.65}}, "checkpoint_curve", "slower", 1.12, 2),
        ("F1", {"trainer_fp16": {"samples_per_s": 11}}, "autocast_models", "bert_faster", 3.7, 1.1),
    ],
)
def test_where_a_small_batch_keeps_the_gpu_waiting_a_claim_depends_on_it(
    name: str, slow: dict[str, Any], experiment: str, figure: str, full: float, not_so: float
) -> None:
    for value, verdict in ((full, DEPENDS), (not_so, REFUTED)):
        beside = {experiment: {figure: value, "batch": 24}}
        found = claim(name).judge(on_gpu(EXAMPLES[name][0] | beside, slow))
        assert found.verdict == verdict, found


def test_without_a_gpu_the_data_loader_depends_on_one() -> None:
    measured = {k: v for k, v in LOADING.items() if k != "faster_when_pinned"} | {"cores": 2}
    found = claim("D1").judge(on_gpu({"data_loader": measured}))
    assert found.verdict == DEPENDS
    assert "2" in found.because


def test_a_judge_reads_only_the_experiments_of_its_claim() -> None:
    for each in catalog.CLAIMS:
        measured = on_gpu(EXAMPLES[each.id][0])
        own = {name: measured[name] for name in each.experiments}
        assert each.judge(own).verdict == CONFIRMED


# ---------------------------------------------------------------------- the runner


def fake_claim(*names: str) -> Claim:
    return Claim(
        "X",
        ("S1",),
        "said",
        "",
        "rule",
        lambda measured: Verdict(CONFIRMED, str(sorted(measured))),
        names,
        without_gpu="all",
    )


def plan(folder: Path, program: str, **more: Any) -> runner.Plan:
    """One whose workers run this program instead; argv is as the real one's."""
    return runner.Plan(folder, "cpu", "small", command=(sys.executable, "-c", program), **more)


# What the real worker writes, without the import of torch.
GOOD = f"""
import json, sys; from pathlib import Path
name, folder = sys.argv[1], Path(sys.argv[-1])
with (folder / "runs").open("a") as f: f.write(name + chr(10))
result = {worker.identity("", "cpu", "small")!r} | dict(experiment=name,
    status="done", reason="", figures=dict(n=1), traces={{}}, seconds=0.1, device_name="x")
(folder / (name + ".json")).write_text(json.dumps(result))
"""
HOW = {
    "crash": ("import os; print('about to'); os.abort()", "SIGABRT"),
    "exit": ("raise SystemExit('no such thing')", "exit code 1: no such thing"),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "out of memory, perhaps"),
    "hang": ("import time; time.sleep(60)", "did not finish in 1 s"),
}


def never(lab: Lab) -> dict[str, Any]:
    raise AssertionError("runs in the worker only")


KNOWN = {
    name: Experiment(never, seconds=(1 if name == "hang" else 60, 60)) for name in ("good", *HOW)
}


@pytest.mark.parametrize("name", sorted(HOW))
def test_an_experiment_that_dies_costs_its_own_row_and_says_why(name: str, tmp_path: Path) -> None:
    program, said = HOW[name]
    both = f"import sys\nif sys.argv[1] == 'good':\n{indented(GOOD)}\nelse:\n{indented(program)}"
    rows = runner.run([fake_claim(name), fake_claim("good")], KNOWN, plan(tmp_path, both)).rows
    assert [row.verdict.verdict for row in rows] == [FAILED, CONFIRMED]
    assert name in rows[0].verdict.because
    assert said in rows[0].verdict.because


def test_an_experiment_ends_with_the_command_that_runs_it(tmp_path: Path) -> None:
    """It is its own process group, which SIGTERM to ours does not reach."""
    ours = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from tests.test_confirm import KNOWN, fake_claim, plan, runner, Path
hang = "import os, pathlib, sys, time; folder = pathlib.Path(sys.argv[-1]); "
hang += "(folder / 'pid').write_text(str(os.getpid())); time.sleep(60)"
runner.run([fake_claim("exit")], KNOWN, plan(Path({str(tmp_path)!r}), hang))
"""
    process = subprocess.Popen([sys.executable, "-c", ours])
    told = tmp_path / "pid"
    until(lambda: told.exists() and told.read_text())
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGTERM
    until(lambda: not Path("/proc", told.read_text()).exists())


def until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def indented(program: str) -> str:
    return "\n".join(f"    {line}" for line in program.strip().splitlines())


def test_what_was_measured_is_not_measured_again_unless_asked(tmp_path: Path) -> None:
    for again in (False, False, True):
        told: list[str] = []
        outcome = runner.run(
            [fake_claim("good")], KNOWN, plan(tmp_path, GOOD, again=again), told.append
        )
        assert outcome.rows[0].verdict.verdict == CONFIRMED
    assert (tmp_path / "runs").read_text().splitlines() == ["good", "good"]


def test_kept_results_are_judged_and_nothing_is_measured(tmp_path: Path) -> None:
    claims = [fake_claim("good"), fake_claim("dies")]
    known = {**KNOWN, "dies": KNOWN["good"]}
    only_kept = plan(tmp_path, GOOD, kept_only=True)
    rows = runner.run(claims, known, only_kept).rows
    assert [row.verdict.verdict for row in rows] == [SKIPPED, SKIPPED]
    assert "without --kept" in rows[0].verdict.because
    assert list(tmp_path.iterdir()) == []
    runner.run(claims[:1], known, plan(tmp_path, GOOD))
    runner.run(claims[1:], known, plan(tmp_path, "raise SystemExit('no more')"))
    rows = runner.run(claims, known, only_kept).rows
    assert [row.verdict.verdict for row in rows] == [CONFIRMED, FAILED]
    assert "no more" in rows[1].verdict.because
    assert (tmp_path / "runs").read_text().splitlines() == ["good"]


def test_a_result_of_another_torch_or_scale_is_not_used(tmp_path: Path) -> None:
    runner.run([fake_claim("good")], KNOWN, plan(tmp_path, GOOD))
    kept = json.loads((tmp_path / "good.json").read_text())
    (tmp_path / "good.json").write_text(json.dumps(kept | {"torch": "1.0"}))
    runner.run([fake_claim("good")], KNOWN, plan(tmp_path, GOOD))
    assert (tmp_path / "runs").read_text().splitlines() == ["good", "good"]


def test_what_is_missing_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    known = {
        "package": Experiment(never, needs=("no_such_package",)),
        "gpu": Experiment(never, gpus=1),
    }
    claims = [fake_claim("package"), fake_claim("gpu")]
    rows = runner.run(claims, known, plan(tmp_path, "raise SystemExit(1)")).rows
    assert [row.verdict.verdict for row in rows] == [SKIPPED, SKIPPED]
    assert (
        "no_such_package is not installed: pip install no_such_package" in rows[0].verdict.because
    )
    assert "CUDA device" in rows[1].verdict.because


def test_what_only_adds_to_a_claim_fails_beside_its_verdict_and_not_in_silence(
    tmp_path: Path,
) -> None:
    both = (
        f"import sys\nif sys.argv[1] == 'good':\n{indented(GOOD)}\nelse:\n    raise SystemExit(4)"
    )
    adding = dataclasses.replace(fake_claim("good"), welcome=("exit",))
    outcome = runner.run([adding], KNOWN, plan(tmp_path, both))
    assert outcome.rows[0].verdict.verdict == CONFIRMED
    assert "without exit, which failed" in outcome.rows[0].verdict.because
    assert commands._exit_code(outcome) == 1


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "failed", "out of memory"),
        (ValueError("two\nlines"), "failed", "ValueError: two lines"),
        (Missing("NVML is not there: install a driver"), "skipped", "install a driver"),
    ],
)
def test_an_experiment_that_raises_leaves_a_result_that_says_why(
    error: Exception, status: str, said: str, tmp_path: Path, monkeypatch
) -> None:
    def run(lab: Lab) -> dict[str, Any]:
        raise error

    monkeypatch.setitem(EXPERIMENTS, "raises", Experiment(run))
    result = worker.conduct(Lab("cpu", "small", tmp_path, "raises"))
    assert result["status"] == status
    assert said in result["reason"]


def test_unexplained_memory_is_exit_code_3_and_a_failure_1(tmp_path: Path) -> None:
    outcome = runner.run([fake_claim("good")], KNOWN, plan(tmp_path, GOOD))
    assert commands._exit_code(outcome) == 0
    outcome.results["good"]["traces"] = {"t": {"unknown_share": 0.002}}
    unexplained = runner.Outcome(
        outcome.plan, [runner.judged(fake_claim("good"), outcome.results)], outcome.results
    )
    assert commands._exit_code(unexplained) == 3
    outcome.results["good"] |= {"status": "failed", "reason": "it"}
    failed = runner.judged(fake_claim("good"), outcome.results)
    assert commands._exit_code(runner.Outcome(outcome.plan, [failed], outcome.results)) == 1


# ---------------------------------------------------------------------- the command


FAST = ["F3", "L3", "L2", "B1"]


@pytest.fixture(scope="module")
def confirmed(tmp_path_factory) -> Path:
    """A few experiments that take no time, run for real."""
    folder = tmp_path_factory.mktemp("confirm")
    arguments = ["confirm", *FAST, "--out", str(folder / "out"), "--device", "cpu"]
    assert main([*arguments, "--markdown", str(folder / "a.md")]) == 0
    return folder


@pytest.mark.ci
@pytest.mark.slow
def test_the_fast_ones_are_judged_as_they_are(confirmed: Path, capsys) -> None:
    code = main(["confirm", *FAST, "--json", "--device", "cpu", "--out", str(confirmed / "out")])
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert code == 0
    assert {c["id"]: c["verdict"] for c in found["claims"]} == {
        "B1": CONFIRMED,
        "F3": REFUTED,
        "L2": DEPENDS,
        "L3": CONFIRMED,
    }
    assert found["pytracer_json"] == 1
    assert all((c["unknown_share"] or 0.0) <= 0.001 for c in found["claims"])
    assert "measured before" in captured.err


@pytest.mark.slow
def test_traces_are_kept_beside_the_measurements(confirmed: Path) -> None:
    from pytracer import load

    kept = sorted((confirmed / "out").glob("validation.*.pytrace"))
    assert [path.name for path in kept] == [
        "validation.no_grad.pytrace",
        "validation.recording.pytrace",
    ]
    stated = json.loads((confirmed / "out" / "validation.json").read_text())
    peak = stated["traces"]["recording"]["peak_bytes"]
    assert load(kept[1]).peak.bytes == peak


@pytest.mark.slow
def test_the_page_has_every_claim_and_every_trace(confirmed: Path) -> None:
    text = (confirmed / "a.md").read_text()
    for name in FAST:
        assert f"| {name} |" in text
    assert "validation.recording" in text


@pytest.mark.slow
def test_a_page_is_not_overwritten_by_mistake(confirmed: Path, capsys) -> None:
    arguments = ["confirm", "F3", "--device", "cpu", "--out", str(confirmed / "out")]
    assert main([*arguments, "--markdown", str(confirmed / "a.md")]) == 1
    assert "exists" in capsys.readouterr().err


def test_an_unknown_claim_is_one_line_with_those_that_there_are(capsys) -> None:
    assert main(["confirm", "K1", "nonsense"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "nonsense" in said
    assert all(name in said for name in IDS)


def test_the_list_has_every_claim_and_what_its_documents_are(capsys) -> None:
    assert main(["confirm", "--list"]) == 0
    text = capsys.readouterr().out
    claims, _, documents = text.partition("\nThe documents\n")
    lines = claims.splitlines()
    assert [line.split()[0] for line in lines if line and not line.startswith(" ")] == [
        c.id for c in catalog.CLAIMS
    ]
    assert max(map(len, text.splitlines())) <= 80
    assert documents.splitlines() == [f"{name}   {title}" for name, title in SOURCES.items()]


def test_the_page_in_the_docs_names_the_documents() -> None:
    page = (Path(__file__).parents[1] / "docs" / "confirm.md").read_text()
    for name, title in SOURCES.items():
        assert f"- {name}: {title}" in page


def test_where_nothing_is_kept_nothing_is_judged_and_no_folder_made(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "none"
    assert main(["confirm", "F3", "--device", "cpu", "--kept", "--out", str(folder)]) == 2
    assert "without --kept" in capsys.readouterr().err
    assert not folder.exists()


def test_a_page_without_traces_says_nothing_of_their_memory() -> None:
    outcome = runner.Outcome(runner.Plan(Path("out"), "cpu", "small"), [], {})
    document = report.document(outcome)
    page = report.markdown_page(document)
    assert "is unknown" not in page
    assert "Where the memory was" not in page


def test_the_screen_is_80_columns_wide() -> None:
    rows = [
        runner.Row(each, each.judge(on_gpu(EXAMPLES[each.id][0])), 0.0) for each in catalog.CLAIMS
    ]
    outcome = runner.Outcome(runner.Plan(Path("out"), "cpu", "small"), rows, {})
    document = report.document(outcome)
    assert max(map(len, report.text(document).splitlines())) <= 80
    assert document["verdicts"][CONFIRMED] == len(IDS)


def test_ids_are_understood_in_lower_case() -> None:
    assert [c.id for c in catalog.chosen(["k1", "BS"])] == ["K1", "BS"]
    with pytest.raises(errors.UsageError):
        catalog.chosen(["K99"])
