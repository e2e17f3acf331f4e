"""The documents' own table: BERT-large, 512 sequences of 512 tokens, in every combination.

Each row is an experiment of its own: a traced run of a few optimizer steps from before the model
is on the device, then an untraced one that is timed. The model has random weights, from its
configuration; attention writes its scores out, as it did when the documents were written.
"""

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from pytracer.claims.claim import (
    CONFIRMED,
    DEPENDS,
    REFUTED,
    Claim,
    Figures,
    Measured,
    Verdict,
    change,
    confirmed_if,
    full_size,
    mib,
    on_gpu,
    ranged,
)
from pytracer.claims.experiment import Lab, experiment, spread

BATCH = 4
_NEEDS = ("transformers", "accelerate")


@dataclass(frozen=True)
class Recipe:
    """How a row of the table trains."""

    batch: int = BATCH
    accumulation: int = 1
    checkpointing: bool = False
    precision: str = "fp32"  # fp32, tf32, fp16, bf16
    optimizer: str = "adamw_torch"

    def on(self, device: str) -> "Recipe":
        """What stands in for it there: the CPU's autocast is of bf16."""
        if device == "cpu" and self.precision == "fp16":
            return Recipe(self.batch, self.accumulation, self.checkpointing, "bf16", self.optimizer)
        return self


_ALL = Recipe(1, 4, checkpointing=True, precision="fp16")
RECIPES = {
    "vanilla": Recipe(),
    "accumulation": Recipe(1, 4),
    "checkpointing": Recipe(1, 4, checkpointing=True),
    "fp16": Recipe(precision="fp16"),
    "all": _ALL,
    "adafactor": Recipe(optimizer="adafactor"),
    "all_adafactor": Recipe(1, 4, True, "fp16", "adafactor"),
    "8bit": Recipe(optimizer="adam8bit"),
    "all_8bit": Recipe(1, 4, True, "fp16", "adam8bit"),
    "bf16": Recipe(precision="bf16"),
    "tf32": Recipe(precision="tf32"),
}


def configuration(scale: str) -> Any:
    """bert-large-uncased's, or one of the same proportions that a CPU trains in seconds."""
    from transformers import BertConfig

    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    sizes |= {"intermediate_size": 4096}
    if scale == "small":
        sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        sizes |= {"intermediate_size": 512, "vocab_size": 1000}
    config = BertConfig(**sizes)
    config._attn_implementation = "eager"
    return config


def model(scale: str) -> Any:
    """A classifier with random weights."""
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(configuration(scale))


def sequences(lab: Lab, count: int) -> list[dict[str, Any]]:
    """Random tokens and labels, as the documents' `dummy_data`."""
    length = lab.pick(128, 512)
    vocabulary = configuration(lab.scale).vocab_size
    tokens = torch.randint(100, vocabulary, (count, length))
    labels = torch.randint(0, 2, (count,))
    return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]


# ---------------------------------------------------------------------- the two ways to train


def with_trainer(lab: Lab, recipe: Recipe, net: Any, steps: int, ended: Callable[[], None]) -> Any:
    """Through Hugging Face's Trainer; `ended` is called after each optimizer step.

    What it returns is what a script still holds when it asks how much memory is in use.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ended()

    arguments = TrainingArguments(
        output_dir=str(lab.folder / f"{lab.name}.trainer"),
        per_device_train_batch_size=recipe.batch,
        gradient_accumulation_steps=recipe.accumulation,
        **_checkpointing_options(TrainingArguments, recipe),
        fp16=recipe.precision == "fp16",
        bf16=recipe.precision == "bf16",
        optim="adamw_torch" if recipe.optimizer == "adam8bit" else recipe.optimizer,
        max_steps=steps,
        max_grad_norm=0.0,  # the documents' other loop does not clip, and they are compared
        use_cpu=not lab.cuda,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    data = sequences(lab, steps * recipe.batch * recipe.accumulation)
    trainer = Trainer(
        model=net,
        args=arguments,
        train_dataset=data,
        callbacks=[Clock()],
        optimizers=(_eight_bit_adam(net) if recipe.optimizer == "adam8bit" else None, None),
    )
    trainer.train()
    return trainer


def with_accelerate(
    lab: Lab, recipe: Recipe, net: Any, steps: int, ended: Callable[[], None]
) -> Any:
    """The loop that the documents print."""
    from accelerate import Accelerator

    precision = recipe.precision if recipe.precision in ("fp16", "bf16") else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=not lab.cuda)
    if recipe.checkpointing:
        enable = getattr(net, "activation_checkpointing_enable", net.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    data = sequences(lab, steps * recipe.batch * recipe.accumulation)
    loader: Any = torch.utils.data.DataLoader(
        data,  # type: ignore[arg-type]
        batch_size=recipe.batch,
        pin_memory=lab.cuda,
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-5)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    net.train()
    for number, batch in enumerate(loader, 1):
        loss = net(**batch).loss / recipe.accumulation
        accelerator.backward(loss)
        if number % recipe.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
            ended()
    return accelerator, optimizer


def _eight_bit_adam(net: Any) -> Any:
    """Handed over, as the documents do: the Trainer's own keeps embeddings in 32 bits."""
    import bitsandbytes

    return bitsandbytes.optim.Adam8bit(net.parameters(), lr=5e-5)


def _checkpointing_options(arguments: Any, recipe: Recipe) -> dict[str, Any]:
    """Version 5 of transformers has another name for it, and version 6 only that one."""
    known = inspect.signature(arguments).parameters
    name = "activation_checkpointing"
    name = name if name in known else "gradient_checkpointing"
    options = {"use_reentrant": False}
    return {name: True, f"{name}_kwargs": options} if recipe.checkpointing else {}


Way = Callable[[Lab, Recipe, Any, int, Callable[[], None]], Any]


def table_row(lab: Lab, recipe: Recipe, way: Way = with_trainer) -> dict[str, Any]:
    """A row: memory by category from a traced run, then times from an untraced one."""
    recipe = recipe.on(lab.device)
    torch.set_float32_matmul_precision("high" if recipe.precision == "tf32" else "highest")
    with lab.traced("training"):
        net = model(lab.scale)
        parameters = sum(p.numel() for p in net.parameters())
        # The gradient scaler of fp16 may leave out the first steps.
        held = way(lab, recipe, net, 5, lambda: None)
    # Another model: what wraps this one would be around it twice.
    del held, net
    lab.forget()
    with torch.device(lab.device):
        net = model(lab.scale)
    moments: list[float] = []

    def ended() -> None:
        lab.wait()
        moments.append(time.perf_counter())

    steps = lab.pick(12, 20)
    way(lab, recipe, net, steps, ended)
    taken = [b - a for a, b in pairwise(moments[lab.pick(1, 3) :])]
    samples = recipe.batch * recipe.accumulation
    figures = lab.figures("training") | spread("step_s", taken)
    figures |= spread("samples_per_s", [samples / each for each in taken])
    figures["batch"] = recipe.batch
    figures["precision"] = recipe.precision
    figures["parameters"] = parameters
    figures["sequences_timed"] = samples * len(taken)
    figures["at_512_sequences_s"] = 512 / figures["samples_per_s"]
    return figures


def _register() -> None:
    for name, recipe in RECIPES.items():
        needs = (*_NEEDS, "bitsandbytes") if "8bit" in name else _NEEDS
        gpus = 1 if "8bit" in name or name == "tf32" else 0
        experiment(f"trainer_{name}", needs=needs, gpus=gpus)(partial(table_row, recipe=recipe))
    experiment("accelerate_all", needs=_NEEDS)(partial(table_row, recipe=_ALL, way=with_accelerate))


_register()


# ---------------------------------------------------------------------- verdicts

_TIMES = "Times are this CPU's, and bf16 stands in for fp16. "
_RATIOS = (
    "A model of 4 layers and width 128 shows ratios of memory and what each category does; the "
    "documents' own sizes need a GPU."
)


def _row_text(row: Figures) -> str:
    shown = f"{ranged(row, 'samples_per_s')} samples/s, peak {mib(row['peak_bytes'])}"
    return f"{shown}, NVML {mib(row['nvml_used'])}" if row.get("nvml_used") else shown


def _against(row: Figures, base: Figures) -> str:
    """This row's numbers, and how they differ from another's."""
    memory = change(row["peak_bytes"], base["peak_bytes"])
    speed = row["samples_per_s"] / base["samples_per_s"]
    return f"{_row_text(row)}: memory {memory}, {speed:.2f}x as fast"


def _vanilla(mib_of_document: float) -> Callable[[Measured], Verdict]:
    def judge(measured: Measured) -> Verdict:
        row = measured["trainer_vanilla"]
        count = row["parameters"]
        states = sum(row[f"{n}_most"] for n in ("weights", "gradients", "optimizer_state"))
        per_parameter = states / count
        text = (
            f"{_row_text(row)}; {per_parameter:.2f} B per parameter, "
            f"activations {mib(row['activations_bytes'])}"
        )
        if abs(per_parameter - 16) > 0.16:
            return Verdict(REFUTED, text, "weights, gradients and Adam are not 16 B per parameter")
        if not (on_gpu(row) and full_size(row)):
            return Verdict(DEPENDS, text, "the model's size: this one is scaled down")
        apart = row["reserved_peak"] / 2**20 / mib_of_document - 1
        if abs(apart) <= 0.15:
            return Verdict(CONFIRMED, text)
        return Verdict(
            DEPENDS, text, f"library versions and the cache: reserved memory is {apart:+.0%}"
        )

    return judge


def _accumulation(measured: Measured) -> Verdict:
    row, base = measured["trainer_accumulation"], measured["trainer_vanilla"]
    slope = (row["activations_most"] / row["batch"]) / (base["activations_most"] / base["batch"])
    falls = row["peak_bytes"] <= 0.75 * base["peak_bytes"]
    text = f"{_against(row, base)}; activations per sample x {slope:.4f}"
    return confirmed_if(falls and abs(slope - 1) <= 0.02, text)


_SECOND_FORWARD = 1 / 3  # of a step's FLOPs


def _checkpointing(measured: Measured) -> Verdict:
    row, base = measured["trainer_checkpointing"], measured["trainer_accumulation"]
    slower = row["step_s"] / base["step_s"] - 1
    least = row.get("step_s_low", row["step_s"]) / base.get("step_s_high", base["step_s"]) - 1
    most = row.get("step_s_high", row["step_s"]) / base.get("step_s_low", base["step_s"]) - 1
    text = f"{_against(row, base)}; {slower:+.1%} ({least:+.1%} to {most:+.1%}) time"
    if row["peak_bytes"] >= base["peak_bytes"]:
        return Verdict(REFUTED, text)
    if not (on_gpu(row) and full_size(row)):
        return Verdict(DEPENDS, text, "the model's size for the time: this one is scaled down")
    if least > 0.25 and "checkpoint_curve" in measured:
        full = measured["checkpoint_curve"]
        if full["slower"] <= 1 + _SECOND_FORWARD:
            waits = (
                "what limits: here the host, which hands out a batch of 1 in more time than the "
            )
            waits += (
                f"GPU needs for it; at batch size {full['batch']} it takes {full['slower']:.2f}x"
            )
            return Verdict(DEPENDS, text, waits)
    return confirmed_if(least <= 0.25 and most >= 0.15, text)


def _fp16(measured: Measured) -> Verdict:
    row, base = measured["trainer_fp16"], measured["trainer_vanilla"]
    added, without = measured["trainer_all"], measured["trainer_checkpointing"]
    speed = row["samples_per_s"] / base["samples_per_s"]
    text = (
        f"{_against(row, base)}; added to accumulation and checkpointing: memory "
        f"{change(added['peak_bytes'], without['peak_bytes'])}; 16-bit copies of weights "
        f"{row['weights_most'] / base['weights_most']:.2f}x the weights"
    )
    if "trainer_bf16" in measured:
        text += f"; bf16 {measured['trainer_bf16']['samples_per_s']:.2f} samples/s"
    if not on_gpu(row):
        return Verdict(DEPENDS, text, "a GPU with 16-bit units: this is a CPU's bf16")
    small = row["peak_bytes"] <= 1.05 * base["peak_bytes"]
    full = measured.get("autocast_models", {}).get("bert_faster", 0)
    if speed < 1.6 and small and full >= 1.6:
        waits = (
            "what limits: here the host, which hands out a batch of 4 in more time than the GPU "
        )
        waits += f"needs for it; in full batches autocast makes BERT {full:.2f}x as fast"
        return Verdict(DEPENDS, text, waits)
    return confirmed_if(speed >= 1.6 and small, text)


def _all_three(measured: Measured) -> Verdict:
    row, base = measured["trainer_all"], measured["trainer_vanilla"]
    memory = row["peak_bytes"] / base["peak_bytes"]
    faster = row["samples_per_s"] >= base["samples_per_s"]
    text = _against(row, base)
    if not 0.35 <= memory <= 0.65:
        return Verdict(REFUTED, text)
    if not on_gpu(row):
        return Verdict(DEPENDS, text, "a GPU with 16-bit units for the speed; memory is as said")
    return confirmed_if(faster, text)


def _adafactor(measured: Measured) -> Verdict:
    row, base = measured["trainer_adafactor"], measured["trainer_vanilla"]
    saved = (base["optimizer_state_most"] - row["optimizer_state_most"]) / row["parameters"]
    peak = (base["peak_bytes"] - row["peak_bytes"]) / row["parameters"]
    text = (
        f"{_against(row, base)}; optimizer state {saved:.2f} B per parameter less, "
        f"peak {peak:.2f} B per parameter less"
    )
    return confirmed_if(saved >= 3.8 and peak > 0, text)


def _times_less(times: float, experiment_name: str) -> Callable[[Measured], Verdict]:
    def judge(measured: Measured) -> Verdict:
        row, base = measured[experiment_name], measured["trainer_vanilla"]
        less = base["peak_bytes"] / row["peak_bytes"]
        text = f"{_against(row, base)}; {less:.2f}x less memory"
        if less >= 0.85 * times:
            return Verdict(CONFIRMED, text)
        if less >= 1.5:
            return Verdict(DEPENDS, text, "how much of the memory activations are")
        return Verdict(REFUTED, text)

    return judge


def _eight_bit(measured: Measured) -> Verdict:
    row, base = measured["trainer_8bit"], measured["trainer_vanilla"]
    saved = (base["optimizer_state_most"] - row["optimizer_state_most"]) / row["parameters"]
    all_less = base["peak_bytes"] / measured["trainer_all_8bit"]["peak_bytes"]
    text = (
        f"{_against(row, base)}; {saved:.2f} B per parameter saved; with all: {all_less:.2f}x less"
    )
    return confirmed_if(5.7 <= saved <= 6.1 and all_less >= 2.5, text)


def _same_categories(measured: Measured) -> Verdict:
    one, other = measured["trainer_all"], measured["accelerate_all"]
    names = [n for n in one if n.endswith("_bytes") and n not in ("peak_bytes",)]
    apart = {n: other[n] - one[n] for n in names}
    worst = max(apart, key=lambda n: abs(apart[n]))
    share = abs(apart[worst]) / one["peak_bytes"]
    text = (
        f"Trainer {mib(one['peak_bytes'])}, Accelerate {mib(other['peak_bytes'])}; the most that "
        f"a category differs at the peak: {worst.removesuffix('_bytes')} {apart[worst]:+,} B"
    )
    return confirmed_if(share <= 0.001, text)


CLAIMS = (
    Claim(
        "V1",
        ("S0", "S1"),
        "vanilla, batch size 4: 57.82 s, 8.86 samples/s, 14949 MB",
        "14949 - 1343 - 16 B per parameter (5114) = 8492 MiB of activations, temporaries, cache",
        "CONFIRMED if weights, gradients and Adam are 16 B per parameter (1 %) and reserved memory "
        "is within 15 % of 14949 - 1343 MiB; DEPENDS if only the first; else REFUTED",
        _vanilla(14949 - 1343),
        ("trainer_vanilla",),
        without_gpu=_RATIOS,
    ),
    Claim(
        "V2",
        ("S4",),
        "vanilla, batch size 4: 40.96 s, 12.50 samples/s, 12852 MB",
        "12852 - 1278 that was in use before = 11574 MiB, context included",
        "as V1, of 12852 - 1278 MiB",
        _vanilla(12852 - 1278),
        ("trainer_vanilla",),
        without_gpu=_RATIOS,
    ),
    Claim(
        "G1",
        ("S1",),
        "gradient accumulation, 4 of batch size 1: 66.03 s, 7.75 samples/s, 8681 MB",
        "-42 % memory, +14 % time; what is left beyond 16 B per parameter is 1/3.8: as the batch",
        "CONFIRMED if memory falls by at least 25 % and activations per sample are constant "
        "within 2 %; else REFUTED",
        _accumulation,
        ("trainer_vanilla", "trainer_accumulation"),
        without_gpu=_TIMES + _RATIOS,
    ),
    Claim(
        "C1",
        ("S1",),
        "checkpointing: 85.47 s, 5.99 samples/s, 6775 MB; slows down training by about 20 %",
        "+29.4 %, not 20 %; a second forward is a third of the FLOPs: +33 %",
        "CONFIRMED if memory falls and a step takes 15 to 25 % longer, within its spread; DEPENDS if "
        "memory falls and the model is scaled down, or a batch that fills the GPU (C2's) takes no "
        "more than a third longer; else REFUTED",
        _checkpointing,
        ("trainer_accumulation", "trainer_checkpointing"),
        welcome=("checkpoint_curve",),
        without_gpu=_TIMES + _RATIOS,
    ),
    Claim(
        "F1",
        ("S1",),
        "fp16: 27.46 s, 18.64 samples/s, 13939 MB; almost twice as fast; 1.5x the original model",
        "2.11x as fast, -6.8 % memory; but added to accumulation and checkpointing +7.4 %",
        "CONFIRMED if at least 1.6x as fast with no more than 5 % more memory; DEPENDS where there "
        "is no GPU, or batches that fill it (P1's BERT) are that fast; else REFUTED",
        _fp16,
        ("trainer_vanilla", "trainer_fp16", "trainer_all", "trainer_checkpointing"),
        welcome=("trainer_bf16", "autocast_models"),
        without_gpu=_TIMES + _RATIOS,
    ),
    Claim(
        "F2",
        ("S1",),
        "accumulation, checkpointing and fp16: 50.76 s, 10.09 samples/s, 7275 MB; about half the "
        "memory, slightly faster",
        "48.7 % of the memory, 12 % faster",
        "CONFIRMED if memory is 35 to 65 % and it is no slower; REFUTED if not; DEPENDS where "
        "memory is and there is no GPU",
        _all_three,
        ("trainer_vanilla", "trainer_all"),
        without_gpu=_TIMES + _RATIOS,
    ),
    Claim(
        "O4",
        ("S1", "S4"),
        "Adafactor: 64.31 s, 7.96 samples/s, 12295 MB (S4: 43.82 s, 11.69 samples/s, 10440 MB)",
        "-8.30 and -7.55 B per parameter, +11 % and +7 % time",
        "CONFIRMED if its state is at least 3.8 B per parameter less than AdamW's and the peak "
        "falls; else REFUTED",
        _adafactor,
        ("trainer_vanilla", "trainer_adafactor"),
        without_gpu=_TIMES + _RATIOS,
    ),
    Claim(
        "O5",
        ("S1", "S4"),
        "accumulation, checkpointing, fp16 and Adafactor: 56.54 s, 9.06 samples/s, 4847 MB, 3x less",
        "3.08x; S4 12852 / 5142 = 2.50x, where the text says 2x",
        "CONFIRMED if at least 2.55x less memory; DEPENDS from 1.5x; else REFUTED",
        _times_less(3.0, "trainer_all_adafactor"),
        ("trainer_vanilla", "trainer_all_adafactor"),
        without_gpu=_TIMES + _RATIOS,
    ),
    Claim(
        "O6",
        ("S1",),
        "8-bit Adam: 55.95 s, 9.15 samples/s, 13085 MB; with everything 49.46 s, 5363 MB, 3x less",
        "5.83 B per parameter; 2.79x",
        "CONFIRMED if 5.7 to 6.1 B per parameter are saved, and 2.5x with everything; else REFUTED",
        _eight_bit,
        ("trainer_vanilla", "trainer_8bit", "trainer_all_8bit"),
        without_gpu="bitsandbytes' optimizers are measured on a GPU only.",
    ),
    Claim(
        "A2",
        ("S1",),
        "Accelerate: indeed it does use the same memory (5363 MB)",
        "",
        "CONFIRMED if at the peak no category differs by more than 0.1 % of it; else REFUTED",
        _same_categories,
        ("trainer_all", "accelerate_all"),
        without_gpu=_RATIOS,
    ),
)
