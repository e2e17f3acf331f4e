"""Compares imagined runs with real ones: the peak, each category and reserved bytes.

    python benchmarks/imagine.py models --out benchmarks/results    # needs a GPU
    python benchmarks/imagine.py large --out benchmarks/results     # needs nothing: Llama-70B

models: each program runs three times, each time in a process of its own: on the GPU, traced;
imagined beside the GPU; imagined where no GPU is visible. The last two must be equal to the byte.

large: one training step of a 70B Llama, with the seconds and the memory that imagining it takes.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from benchmarks import slug  # noqa: E402

MOST_OPS = 12
BOUNDS = ("peak_at_most", "reserved_at_most")
LONGEST = 120  # seconds for one program
AT_ONCE = 8  # programs, which fit on the GPU together
STEPS = 2
Program = Callable[[str], None]

# ---------------------------------------------------------------- how they train


def adamw(model: nn.Module) -> Any:
    """AdamW as torch chooses it: many tensors at once."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def fused(model: nn.Module) -> Any:
    """AdamW in one kernel."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def loop(model: nn.Module) -> Any:
    """AdamW, one tensor after the other."""
    return torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)


def momentum(model: nn.Module) -> Any:
    """SGD with its buffer."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def adafactor(model: nn.Module) -> Any:
    """Factored second moments."""
    return torch.optim.Adafactor(model.parameters(), lr=1e-3)


def trains(
    make: Callable[[], nn.Module],
    batch: Callable[[str], dict[str, Any]],
    optimizer: Callable[[nn.Module], Any] = adamw,
    *,
    amp: bool = False,
    dtype: torch.dtype | None = None,
    checkpoint: bool = False,
    micro: int = 1,
) -> Program:
    """Returns a program of a few steps, which logs its loss."""

    def program(device: str) -> None:
        torch.manual_seed(0)
        model = make().to(device=device, dtype=dtype).train()
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        updates = optimizer(model)
        for _ in range(STEPS):
            for _ in range(micro):
                with torch.autocast(device, dtype=torch.bfloat16, enabled=amp):
                    given = model(**batch(device))
                    loss = given["loss"] if isinstance(given, dict) else given
                del given
                loss.backward()
                float(loss.item())
                del loss
            updates.step()
            updates.zero_grad()

    return program


# ---------------------------------------------------------------- transformers


def words(vocabulary: int, rows: int, length: int) -> Callable[[str], dict[str, Any]]:
    """Returns token ids, which are their own labels."""

    def batch(device: str) -> dict[str, Any]:
        ids = torch.randint(vocabulary, (rows, length), device=device)
        return {"input_ids": ids, "labels": ids}

    return batch


def images(rows: int, size: int, classes: int = 1000) -> Callable[[str], dict[str, Any]]:
    """Returns pictures and their classes."""

    def batch(device: str) -> dict[str, Any]:
        return {
            "pixel_values": torch.randn(rows, 3, size, size, device=device),
            "labels": torch.randint(classes, (rows,), device=device),
        }

    return batch


def sounds(rows: int, frames: int) -> Callable[[str], dict[str, Any]]:
    """Returns spectra, and the words in them."""

    def batch(device: str) -> dict[str, Any]:
        return {
            "input_features": torch.randn(rows, 80, frames, device=device),
            "labels": torch.randint(1000, (rows, 64), device=device),
        }

    return batch


def of(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """Makes a model of transformers from a configuration."""

    def make() -> nn.Module:
        import transformers

        shape = getattr(transformers, config)(**options)
        model: nn.Module = getattr(transformers, name)(shape)
        return model

    return make


GPT2 = ("GPT2LMHeadModel", "GPT2Config")
LLAMA = ("LlamaForCausalLM", "LlamaConfig")
LLAMA_SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "use_cache": False,
}
GPT2_SIZES = {"use_cache": False, "n_layer": 6}

TRANSFORMERS: dict[str, Program] = {
    "BERT, fp32, AdamW": trains(
        of("BertForMaskedLM", "BertConfig", num_hidden_layers=6), words(30522, 8, 256)
    ),
    "BERT, AMP, fused AdamW": trains(
        of("BertForMaskedLM", "BertConfig", num_hidden_layers=6),
        words(30522, 16, 256),
        fused,
        amp=True,
    ),
    "GPT-2, AMP, AdamW": trains(of(*GPT2, **GPT2_SIZES), words(50257, 8, 512), amp=True),
    "GPT-2, fp32, Adam in a loop": trains(of(*GPT2, **GPT2_SIZES), words(50257, 4, 512), loop),
    "GPT-2, AMP, eager attention": trains(
        of(*GPT2, **GPT2_SIZES, attn_implementation="eager"), words(50257, 4, 512), fused, amp=True
    ),
    "GPT-2, AMP, checkpointed": trains(
        of(*GPT2, **GPT2_SIZES), words(50257, 8, 512), fused, amp=True, checkpoint=True
    ),
    "Llama, bfloat16, SGD": trains(
        of(*LLAMA, **LLAMA_SIZES), words(32000, 4, 512), momentum, dtype=torch.bfloat16
    ),
    "Llama, AMP, accumulation": trains(
        of(*LLAMA, **LLAMA_SIZES), words(32000, 4, 512), fused, amp=True, micro=2
    ),
    "Llama, AMP, checkpointed": trains(
        of(*LLAMA, **LLAMA_SIZES), words(32000, 4, 1024), adamw, amp=True, checkpoint=True
    ),
    "T5, fp32, Adafactor": trains(
        of("T5ForConditionalGeneration", "T5Config", num_layers=6, decoder_start_token_id=0),
        words(32128, 8, 128),
        adafactor,
    ),
    "ViT, AMP, AdamW": trains(
        of("ViTForImageClassification", "ViTConfig", num_hidden_layers=6, num_labels=1000),
        images(32, 224),
        amp=True,
    ),
    "Whisper, AMP, AdamW": trains(
        of(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            encoder_layers=4,
            decoder_layers=4,
            use_cache=False,
            decoder_start_token_id=1,
        ),
        sounds(4, 3000),
        amp=True,
    ),
    "Mamba, fp32, AdamW": trains(
        of(
            "MambaForCausalLM",
            "MambaConfig",
            hidden_size=512,
            num_hidden_layers=2,
            vocab_size=32000,
            use_cache=False,
        ),
        words(32000, 4, 64),
    ),
    "MoE (Mixtral), bfloat16, SGD": trains(
        of(
            "MixtralForCausalLM",
            "MixtralConfig",
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=32000,
            use_cache=False,
        ),
        words(32000, 4, 256),
        momentum,
        dtype=torch.bfloat16,
    ),
}

# ---------------------------------------------------------------- convolutions and recurrence


class UNet(nn.Module):
    """A small U-Net: two levels down and up."""

    def __init__(self, width: int = 64) -> None:
        """Makes a network from pictures to pictures."""
        super().__init__()

        def block(inside: int, outside: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU()
            )

        self.first, self.second = block(3, width), block(width, 2 * width)
        self.middle = block(2 * width, 4 * width)
        self.up_second, self.up_first = block(6 * width, 2 * width), block(3 * width, width)
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss of reproducing the input."""
        first = self.first(pixel_values)
        second = self.second(functional.max_pool2d(first, 2))
        middle = self.middle(functional.max_pool2d(second, 2))
        up = self.up_second(torch.cat([functional.interpolate(middle, scale_factor=2), second], 1))
        up = self.up_first(torch.cat([functional.interpolate(up, scale_factor=2), first], 1))
        return functional.mse_loss(self.last(up).float(), pixel_values)


class Recurrent(nn.Module):
    """A language model with a recurrent layer of torch."""

    def __init__(self, kind: type[nn.Module]) -> None:
        """`kind`: nn.LSTM or nn.GRU."""
        super().__init__()
        self.words = nn.Embedding(10000, 512)
        self.layers = kind(512, 1024, 2, batch_first=True)
        self.head = nn.Linear(1024, 10000)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        logits = self.head(self.layers(self.words(input_ids))[0])
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


OTHERS: dict[str, Program] = {
    "ResNet-50, fp32, SGD": trains(
        of("ResNetForImageClassification", "ResNetConfig", num_labels=1000),
        images(32, 224),
        momentum,
    ),
    "ResNet-50, AMP, AdamW": trains(
        of("ResNetForImageClassification", "ResNetConfig", num_labels=1000),
        images(64, 224),
        amp=True,
    ),
    "ConvNeXt, AMP, AdamW": trains(
        of("ConvNextForImageClassification", "ConvNextConfig", num_labels=1000),
        images(32, 224),
        amp=True,
    ),
    "U-Net, fp32, AdamW": trains(UNet, images(8, 128)),
    "U-Net, AMP, AdamW": trains(UNet, images(8, 128), amp=True),
    "LSTM, fp32, AdamW": trains(lambda: Recurrent(nn.LSTM), words(10000, 16, 128)),
    "GRU, fp32, AdamW": trains(lambda: Recurrent(nn.GRU), words(10000, 16, 128)),
}
PROGRAMS = TRANSFORMERS | OTHERS

# ---------------------------------------------------------------- how they run


def real(name: str) -> dict[str, Any]:
    """Runs a program on the GPU, traced."""
    import pytracer

    with pytracer.trace(devices="cuda", table=False) as t:
        PROGRAMS[name]("cuda")
    stats = torch.cuda.memory_stats()
    return {
        "device": torch.cuda.get_device_name(),
        "requested": stats["requested_bytes.all.peak"],
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        **_of_trace(t),
    }


def imagined(name: str) -> dict[str, Any]:
    """Runs a program on an imagined card."""
    import pytracer

    begin = time.perf_counter()
    with pytracer.imagine("H200") as t:
        PROGRAMS[name]("cuda")
    seconds = time.perf_counter() - begin
    counters = t.data.meta["counters"]["end"]["cuda:0"]
    return {
        "requested": counters["requested_bytes.peak"],
        "allocated": counters["allocated_bytes.peak"],
        "reserved": counters["reserved_bytes.peak"],
        "seconds": round(seconds, 2),
        **_of_trace(t),
    }


def alone(name: str) -> dict[str, Any]:
    """Runs a program on an imagined card, in a process that sees no GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return imagined(name)


def _of_trace(t: Any) -> dict[str, Any]:
    peak = t.peak
    return {
        "peak": peak.bytes,
        "phase": peak.phase,
        "by_category": {name: amount for name, amount in peak.by_category.items() if amount},
        "by_op": _largest_ops(t),
        **bounds(t),
    }


def bounds(t: Any) -> dict[str, int]:
    """The upper bounds of an imagined run, where they are above its peaks."""
    imagined = t.data.meta.get("imagined") or {}
    return {name: imagined[name] for name in BOUNDS if name in imagined}


def _largest_ops(t: Any) -> dict[str, int]:
    """The operators that hold most at the peak, as the errors' explanation."""
    table = t.by("op", at="peak")
    amounts = {str(op): int(amount) for op, amount in table.iloc[:, 0].items()}
    return dict(sorted(amounts.items(), key=lambda one: -one[1])[:MOST_OPS])


WAYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "real": real,
    "imagined": imagined,
    "alone": alone,
}


def answer(measure: Callable[[], dict[str, Any]], file: Path) -> None:
    """Writes what was measured, or the problem, into the file."""
    try:
        found = measure()
    except BaseException as problem:
        traceback.print_exc()
        first = str(problem).partition("\n")[0]
        found = {"problem": f"{type(problem).__name__}: {first}"}
    file.write_text(json.dumps(found))


def apart(script: str, words: list[list[str]]) -> list[dict[str, Any]]:
    """Runs `script --apart WORDS FILE` for each list of words, all at once, and returns the answers.

    Each is a process of its own, because one that has touched a GPU cannot fork another that does.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(len(words))]
        processes = [
            subprocess.Popen([sys.executable, script, "--apart", *each, str(file)])
            for each, file in zip(words, files, strict=True)
        ]
        end = time.monotonic() + LONGEST
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0.1))
            process.kill()
            process.wait()
        return [
            json.loads(file.read_text()) if file.exists() else {"problem": "no answer"}
            for file in files
        ]


def gpus() -> int:
    """Asks in another process, because this one must not touch a GPU."""
    ask = "import sys, torch; sys.exit(torch.cuda.device_count())"
    return subprocess.run([sys.executable, "-c", ask]).returncode


def run_all(names: list[str], ways: list[str], at_once: int) -> Iterator[tuple[str, Any]]:
    """Yields each program's name and its row, with an answer for each way, as they end."""
    rows: dict[str, dict[str, Any]] = {name: {} for name in names}
    with ThreadPoolExecutor(at_once) as pool:
        running = {
            pool.submit(apart, __file__, [[way, name]]): (way, name)
            for name in names
            for way in ways
        }
        for done in as_completed(running):
            way, name = running[done]
            (rows[name][way],) = done.result()
            if len(rows[name]) == len(ways):
                yield name, rows[name]


# ---------------------------------------------------------------- what they say


def line(name: str, row: dict[str, Any]) -> str:
    """Returns one line with the errors of an imagined run."""
    problems = [
        f"{way}: {found['problem'].splitlines()[0]}"
        for way, found in row.items()
        if "problem" in found
    ]
    if problems:
        return f"{name:32} " + "; ".join(problems)
    measured, guessed, apart = row.get("real"), row.get("imagined"), row.get("alone")
    if measured is None or guessed is None:
        either = guessed or apart or {}
        return f"{name:32} {either.get('requested', 0) / 2**20:10.1f} MiB imagined"
    cells = [
        f"{what} {_off(guessed[what], measured[what]):+8.3%}" for what in ("requested", "reserved")
    ]
    worst = max(
        (abs(_category_off(row, category)), category) for category in measured["by_category"]
    )
    same = "equal alone" if _told(guessed) == _told(apart) else "NOT EQUAL ALONE"
    return (
        f"{name:32} {measured['requested'] / 2**20:9.1f} MiB  {'  '.join(cells)}  "
        f"worst category {worst[1]} {worst[0]:.2%} of the peak  {same}"
    )


def _off(guess: int, measured: int) -> float:
    return guess / measured - 1


def _category_off(row: dict[str, Any], category: str) -> float:
    guess: int = row["imagined"]["by_category"].get(category, 0)
    measured: int = row["real"]["by_category"][category]
    return (guess - measured) / float(row["real"]["peak"])


def _told(found: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (found or {}).items() if key not in ("seconds", "device")}


def imagined_again(
    file: Path,
    imagine: Callable[[str], dict[str, Any]],
    judge: Callable[[str, dict[str, Any]], None],
) -> None:
    """Imagines each program of a measured document again, and writes both into the same file."""
    document = json.loads(file.read_text())
    for name, row in document["programs"].items():
        row |= imagine(name)
        judge(name, row)
    versions = {"torch": torch.__version__, "date": _now()}
    document["machine"]["imagined_again"] = versions
    file.write_text(json.dumps(document, indent=1) + "\n")


def _again(name: str) -> dict[str, Any]:
    (found,) = apart(__file__, [["alone", name]])
    return {"imagined": found, "alone": found}


def models(options: argparse.Namespace) -> None:
    """Runs every program every way. Writes after each, so that what was measured is kept."""
    if options.again:
        imagined_again(options.again, _again, lambda name, row: print(line(name, row), flush=True))
        return
    names = [name for name in PROGRAMS if options.only in name]
    ways = list(WAYS) if gpus() else ["alone"]
    rows: dict[str, dict[str, Any]] = {}
    for name, row in run_all(names, ways, options.at_once):
        rows[name] = row
        print(line(name, row), flush=True)
        ordered = {each: rows[each] for each in names if each in rows}
        device = row.get("real", {}).get("device", "")
        if device or ways == ["alone"]:
            write(options.out, "imagine-models", {"programs": ordered}, device or "cpu")


# ---------------------------------------------------------------- large


def large(options: argparse.Namespace) -> None:
    """Imagines a 70B Llama, checkpointed, with fused AdamW."""
    import transformers

    import pytracer

    begin = time.perf_counter()
    shape = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    with pytracer.imagine("H100") as t:
        program = trains(
            lambda: transformers.LlamaForCausalLM(shape),
            words(128256, 1, 4096),
            fused,
            dtype=torch.bfloat16,
            checkpoint=True,
        )
        program("cuda")
    peak = t.peak
    found = {
        "seconds": time.perf_counter() - begin,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "requested": peak.bytes,
        "by_category": {name: amount for name, amount in peak.by_category.items() if amount},
    }
    print(t)
    print(json.dumps(found, indent=1))
    write(options.out, "imagine-large", found)


def write(folder: Path | None, name: str, document: dict[str, Any], device: str = "") -> None:
    """Writes a document with the machine that it was measured on."""
    if folder is None:
        return
    if not device:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    machine = {
        "device": device,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "date": _now(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{slug(device)}.json"
    path.write_text(json.dumps({"machine": machine, **document}, indent=1) + "\n")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def main() -> None:
    """Runs the command line."""
    if sys.argv[1:2] == ["--apart"]:
        way, name, file = sys.argv[2:]
        answer(lambda: WAYS[way](name), Path(file))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["models", "large"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="programs whose name has this")
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--again", type=Path, help="imagine again, beside what this file measured")
    options = parser.parse_args()
    {"models": models, "large": large}[options.what](options)


if __name__ == "__main__":
    main()
