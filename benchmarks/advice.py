"""Makes each change that pytracer advises, and measures what it saves beside what was said.

    python benchmarks/advice.py --out benchmarks/results                   # on a GPU, else on the CPU
    python benchmarks/advice.py --programs gpt2 llama --device cpu   # other rows stay

Each program is recorded, asked for its advice, and run again in a new process for each change, and
once with all mistakes and free savings together. A change that only a person can make is listed
without a measurement. Peaks are requested bytes; on CUDA torch's own count of them is beside ours.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks import advice_models  # noqa: E402
from programs.hints.sick import ByHand  # noqa: E402

STEPS = 5
WITHIN = 0.05  # of the bytes that a mistake or a free saving saves
WITHIN_PLAN = 0.01  # of the peak with a plan


@dataclass(frozen=True)
class How:
    """How a program is written: which mistakes it makes, and which changes were made to it."""

    keeps: bool = False  # a variable with the outputs lives through the backward
    history: str = "no"  # "tensors", "numbers"
    gelu: str = "torch"  # "hand"
    evaluates: str = "no"  # "with grad", "without grad"
    fused: bool | None = None
    foreach: bool | None = None
    gradient_checkpointing: bool = False  # transformers' own
    code: str = ""  # runs once the model is made


# What a change says, and how the program is written then.
MADE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("del ", {"keeps": False}),
    ("put numbers into", {"history": "numbers"}),
    ("keep a number", {"history": "numbers"}),
    ("no_grad", {"evaluates": "without grad"}),
    ("nn.GELU", {"gelu": "torch"}),
    ("fused=True", {"fused": True}),
    ("foreach=False", {"foreach": False}),
    ("gradient_checkpointing_enable()", {"gradient_checkpointing": True}),
)


def made(how: How, row: dict[str, Any]) -> How | None:
    """The program with this change; None if only a person can make it."""
    if row["code"]:
        return replace(how, code=row["code"])
    return next((replace(how, **what) for says, what in MADE if says in row["change"]), None)


# ---------------------------------------------------------------- the programs


class Block(nn.Module):
    """A feed-forward network around a residual."""

    def __init__(self, width: int, gelu: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act = ByHand() if gelu == "hand" else nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As wide as it came."""
        y: torch.Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return y


@dataclass(frozen=True)
class Program:
    """A model by size ("cpu" is small), a batch for it, and how it is written."""

    make: Callable[[How, bool], nn.Module]
    batch: Callable[[bool], dict[str, torch.Tensor]]
    how: How = How()


def stack(**how: Any) -> Program:
    """Layers without a framework."""

    def make(how: How, large: bool) -> nn.Module:
        width, layers, words = (1024, 8, 16384) if large else (256, 4, 2048)
        return nn.Sequential(
            *(Block(width, how.gelu) for _ in range(layers)), nn.Linear(width, words)
        )

    def batch(large: bool) -> dict[str, torch.Tensor]:
        rows, width = (8192, 1024) if large else (512, 256)
        return {"input": torch.randn(rows, width)}

    return Program(make, batch, How(**how))


def shaped(
    make: Callable[[How, bool], nn.Module], batch: Callable[[bool], dict[str, torch.Tensor]]
) -> Program:
    """A well-known program as it is written: its results live on, and its losses are kept."""
    return Program(make, batch, How(keeps=True, gelu="hand", history="tensors"))


def _gpt(how: How, large: bool) -> nn.Module:
    sizes = (32000, 768, 12) if large else (2000, 128, 4)
    return advice_models.Gpt(*sizes, ByHand if how.gelu == "hand" else None)


def _of_words(first: str, words: int, rows: int) -> Callable[[bool], dict[str, torch.Tensor]]:
    def batch(large: bool) -> dict[str, torch.Tensor]:
        shape = (8 * rows, 256) if large else (rows, 64)
        tokens = torch.randint(0, words, shape)
        return {first: tokens, "targets": tokens}

    return batch


def _noisy(large: bool) -> dict[str, torch.Tensor]:
    count, size = (64, 128) if large else (4, 32)
    images, noise = (torch.randn(count, 3, size, size) for _ in range(2))
    return {"images": images, "noise": noise, "level": torch.rand(count, 1, 1, 1)}


def _pictures(large: bool) -> dict[str, torch.Tensor]:
    return {"x": torch.rand(*((16384, 16384) if large else (512, 2048)))}


def transformer(name: str, config: str, small: dict[str, Any]) -> Program:
    """A model of transformers with random weights; its config's defaults are the large one."""

    def make(how: How, large: bool) -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, name)(configured(config, small, large, how.gelu))
        if how.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        return model

    def batch(large: bool) -> dict[str, torch.Tensor]:
        shape = configured(config, small, large)
        if config in ("ViTConfig", "ResNetConfig"):
            size, count = (224, 64) if large else (64, 4)
            images = torch.randn(count, 3, size, size)
            return {"pixel_values": images, "labels": torch.zeros(count, dtype=torch.int64)}
        tokens = torch.randint(0, shape.vocab_size, (8, 512) if large else (4, 64))
        return {"input_ids": tokens, "labels": tokens}

    return Program(make, batch, How(keeps=True, gelu="hand"))


def configured(config: str, small: dict[str, Any], large: bool, gelu: str = "") -> Any:
    """The config of that size. A cache of keys and values is not for training."""
    import transformers

    sizes = dict(LARGE.get(config, {}) if large else small)
    if config == "GPT2Config":
        sizes["activation_function"] = "gelu_new" if gelu == "hand" else "gelu_pytorch_tanh"
    if config == "T5Config":
        sizes["decoder_start_token_id"] = 0
    return getattr(transformers, config)(**sizes, use_cache=False)


_BASE = {"num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 4096}
LARGE = {  # beside the defaults of the configs
    "LlamaConfig": {**_BASE, "hidden_size": 1536, "vocab_size": 32000},
    "BertConfig": {**_BASE, "hidden_size": 768},
}
_NARROW = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
_SMALL = {**_NARROW, "intermediate_size": 512, "vocab_size": 1000}
_VIT = {**_NARROW, "intermediate_size": 512, "image_size": 64, "patch_size": 8}
_LLAMA_TO_TRAIN = transformer("LlamaForCausalLM", "LlamaConfig", _SMALL)

PROGRAMS: dict[str, Program] = {
    "outputs live on": stack(keeps=True),
    "a leak": stack(history="tensors"),
    "gelu by hand": stack(gelu="hand"),
    "evaluation with grad": stack(evaluates="with grad"),
    "healthy": stack(),
    "several mistakes": stack(keeps=True, gelu="hand", history="tensors"),
    "gpt2": transformer(
        *("GPT2LMHeadModel", "GPT2Config"),
        {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 1000, "n_positions": 64},
    ),
    "bert": transformer("BertForMaskedLM", "BertConfig", _SMALL),
    "vit": transformer("ViTForImageClassification", "ViTConfig", _VIT),
    "resnet50": transformer(
        *("ResNetForImageClassification", "ResNetConfig"),
        {"embedding_size": 16, "hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 2, 2]},
    ),
    "llama": _LLAMA_TO_TRAIN,
    "t5": transformer(
        *("T5ForConditionalGeneration", "T5Config"),
        {
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 512,
            "num_layers": 3,
            "num_heads": 4,
            "vocab_size": 1000,
        },
    ),
    "mingpt": shaped(_gpt, _of_words("idx", 2000, 4)),
    "word language model": shaped(
        lambda _, large: advice_models.WordModel(*((32000, 650) if large else (2000, 128))),
        _of_words("data", 2000, 8),
    ),
    "diffusion": shaped(lambda _, large: advice_models.Unet(64 if large else 16), _noisy),
    "vae": shaped(
        lambda _, large: advice_models.Vae(*((16384, 4096) if large else (2048, 400))), _pictures
    ),
    "llama, checkpointed": replace(
        _LLAMA_TO_TRAIN, how=How(keeps=True, gradient_checkpointing=True)
    ),
}


def train(program: Program, how: How, device: str) -> dict[str, Any]:
    """Trains a few steps, and returns the peak and the advice."""
    import pytracer
    from pytracer.analysis.forecasts import changes

    torch.manual_seed(0)
    with pytracer.trace(devices=device, stacks=True, table=False) as t:
        model = program.make(how, device != "cpu").to(device)
        exec(how.code, {"model": model})  # the code that pytracer advises
        options = {"fused": how.fused, "foreach": how.foreach}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)
        work(program, how, model, optimizer, device)
    rows = json.loads(t.advice().to_json(orient="records"))
    name = t.peak.device
    found = {"peak": t.peak.bytes, "advice": rows, "together": changes.together(t.data, name)}
    if device != "cpu":
        found["torch_peak"] = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return found


def work(
    program: Program, how: How, model: nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> None:
    """The steps as a user would write them."""
    history, large = [], device != "cpu"
    for _ in range(STEPS):
        batch = {name: each.to(device) for name, each in program.batch(large).items()}
        outputs = model(**batch)
        if isinstance(outputs, torch.Tensor):
            results, loss = outputs, outputs.square().mean()
        else:
            results, loss = outputs[:2] if isinstance(outputs, tuple) else (outputs, outputs.loss)
        if how.history != "no":
            history.append(results.mean().item() if how.history == "numbers" else results.detach())
        del results
        if not how.keeps:
            del outputs
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if how.evaluates != "no":
        model.eval()
        with torch.set_grad_enabled(how.evaluates == "with grad"):
            for _ in range(2):
                both = [program.batch(large)["input"].to(device) for _ in range(2)]
                model(torch.cat(both)).sum().item()


def apart(name: str, how: How, device: str) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--one", name, json.dumps(asdict(how)), "--device", device]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{name}: {ran.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def rows_of(name: str, device: str) -> Iterator[dict[str, Any]]:
    """What each change was said to save, and what it saved."""
    how = all_made = PROGRAMS[name].how
    before, count = apart(name, how, device), 0
    for row in before["advice"]:
        changed = None if row["saves"] is None else made(how, row)
        after = None if changed is None else apart(name, changed, device)
        yield {"program": name, **row, **compared(before, row, after)}
        if changed is not None and row["kind"] != "trade":
            all_made, count = made(all_made, row) or all_made, count + 1
    if count > 1:
        saves = before["peak"] - before["together"]
        row = {"kind": "free", "change": "all mistakes and free savings together", "saves": saves}
        yield {"program": name, **row, **compared(before, row, apart(name, all_made, device))}


def compared(before: dict[str, Any], row: dict[str, Any], after: Any) -> dict[str, Any]:
    """The saving that was measured, and how far off the prediction is."""
    if after is None:
        return {"peak": before["peak"], "measured": None}
    measured = before["peak"] - after["peak"]
    off = abs(row["saves"] - measured)
    of = after["peak"] * WITHIN_PLAN if row["kind"] == "trade" else abs(measured) * WITHIN
    torches = [each.get("torch_peak") for each in (before, after)]
    found = {"peak": before["peak"], "measured": measured, "off": off, "holds": off <= of}
    return {**found, "torch_peaks": torches}


def others(file: Path, programs: list[str]) -> list[dict[str, Any]]:
    """The file's rows of other programs, if they were measured with this torch."""
    if not file.exists():
        return []
    found = json.loads(file.read_text())
    same = found["torch"] == torch.__version__
    return [row for row in found["rows"] if same and row["program"] not in programs]


def main() -> int:
    """Runs the programs, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS, default=list(PROGRAMS))
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--one", nargs=2, help="a run, which the others start")
    options = parser.parse_args()
    if options.one:
        name, how = options.one
        print(json.dumps(train(PROGRAMS[name], How(**json.loads(how)), options.device)))
        return 0
    began = time.monotonic()
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    where = options.out / f"advice-{machine.lower().replace(' ', '-')}.json"
    rows = others(where, options.programs)
    for name in options.programs:
        for row in rows_of(name, options.device):
            rows.append(row)
            print(
                f"{name:22}{row['saves']!s:>14}{row['measured']!s:>14} {row['change'][:50]}",
                flush=True,
            )
        document = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "machine": machine,
            "torch": torch.__version__,
            "rows": sorted(rows, key=lambda row: [*PROGRAMS].index(row["program"])),
            "seconds": round(time.monotonic() - began),
        }
        where.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
