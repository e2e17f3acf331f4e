"""Asks other estimators for the peaks that benchmarks/imagine.py has measured on a GPU.

    python benchmarks/estimators.py --out benchmarks/results      # on the CPU; needs accelerate

- `accelerate estimate-memory` knows the size of the weights, and the optimizer's by a factor.
- torch's MemTracker runs the step under FakeTensorMode. torch has no backward pass for fake CUDA
  tensors without a driver, so the step runs on fake tensors of the host.
- DeepSpeed's estimator adds up the states of ZeRO-2, here on one GPU without offload.
- kitsune (torch-kitsune) runs the forward pass on one shape of inputs, and adds states by formulas.
  It knows Adam and SGD: for Adafactor it is asked for AdamW.

`--only kitsune` asks one of them, and adds its answers to the newest file.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import imagine, imagine_programs, kept  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PROGRAMS = (
    "BERT, fp32, AdamW",
    "GPT-2, fp32, Adam in a loop",
    "T5, fp32, Adafactor",
    "Mamba, fp32, AdamW",
    "ResNet-50, fp32, SGD",
)


def measured() -> dict[str, Any]:
    """The newest measured peaks."""
    documents = [kept.read(path) for path in RESULTS.glob("imagine-models-nvidia-*.json")]
    newest = max(documents, key=lambda one: one["machine"]["date"])
    return {name: newest["programs"][name]["real"]["requested"] for name in PROGRAMS}


class _Found(BaseException):
    """Carries a model out of a program, which is stopped where it makes its optimizer."""


def parts(name: str, device: str) -> tuple[torch.nn.Module, Callable[[], Any], Any]:
    """The program's model, a function that makes a batch, and its optimizer."""
    program = imagine.PROGRAMS[name]
    inside = dict(zip(program.__code__.co_freevars, program.__closure__ or (), strict=True))
    make, batch, optimizer = (inside[one].cell_contents for one in ("make", "batch", "optimizer"))
    model = make().train()
    model = model if device == "cpu" else model.to(device)  # fake parameters do not move
    return model, lambda: batch(device), optimizer(model)


def accelerate(name: str) -> int:
    """Weights, gradients and two moments in float32."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with torch.device("meta"):
        model = parts(name, "meta")[0]
    total, _ = calculate_maximum_sizes(model)
    stages: dict[str, int] = estimate_training_usage(total, "float32")
    return max(stages.values())


def deepspeed(name: str) -> int:
    """What DeepSpeed's own estimator says."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    with torch.device("meta"):
        model = parts(name, "meta")[0]
    total = sum(one.numel() for one in model.parameters())
    _, on_gpu = estimate_zero2_model_states_mem_needs(
        total, num_gpus_per_node=1, num_nodes=1, cpu_offload=False
    )
    return int(on_gpu)


def mem_tracker(name: str) -> int:
    """The peak that torch's MemTracker sees."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model, batch, optimizer = parts(name, "cpu")
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(imagine_programs.STEPS):
                tracker.reset_mod_stats()
                given = model(**batch())
                loss = given["loss"] if isinstance(given, dict) else given
                del given
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()
    snapshot = tracker.get_tracker_snapshot("peak")
    return int(snapshot[torch.device("cpu")]["Total"])


def kitsune(name: str) -> int:
    """The prediction of torch-kitsune."""
    from kitsune.predict import predict_memory  # type: ignore[import-not-found]

    model, batch, optimizer = parts(name, "cpu")
    inputs = next(iter(batch().values()))
    known = "sgd" if isinstance(optimizer, torch.optim.SGD) else "adamw"
    predicted = predict_memory(
        model, tuple(inputs.shape[1:]), len(inputs), optimizer=known, training=True
    )
    return int(predicted.total_bytes)


def pytracer(name: str) -> int:
    """An imagined run."""
    found: int = imagine.imagined(name)["requested"]
    return found


ESTIMATORS: dict[str, Callable[[str], int]] = {
    "pytracer imagine": pytracer,
    "torch MemTracker": mem_tracker,
    "accelerate estimate-memory": accelerate,
    "DeepSpeed's estimator": deepspeed,
    "kitsune": kitsune,
}


def asked(ask: Callable[[str], int], name: str) -> int | str:
    """The estimator's answer, or its problem."""
    try:
        return ask(name)
    except Exception as problem:
        first = str(problem).partition("\n")[0]
        return f"{type(problem).__name__}: {first}"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=ESTIMATORS, help="ask this one, and add its answers")
    options = parser.parse_args()
    if options.only:
        _add(options.only, options.out or RESULTS)
        return
    rows: dict[str, dict[str, Any]] = {}
    for name, real in measured().items():
        rows[name] = {"measured": real}
        for title, ask in ESTIMATORS.items():
            rows[name][title] = asked(ask, name)
        print(name, rows[name], flush=True)
    imagine.write(options.out, "imagine-peers", {"programs": rows})


def _add(title: str, folder: Path) -> None:
    """Asks one estimator, and adds its answers to those of the others."""
    path = folder / "imagine-peers-cpu.json"
    document = kept.read(path)
    for name, row in document["programs"].items():
        row[title] = asked(ESTIMATORS[title], name)
        print(name, row[title], flush=True)
    kept.write(path, document)


if __name__ == "__main__":
    main()
