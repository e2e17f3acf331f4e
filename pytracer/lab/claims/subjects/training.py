"""Trains BERT-large as each row of the documents' table does: an experiment for each row.

An experiment first traces a few optimizer steps, and begins before the model is on the device. Then
it times a run without a trace. The model has random weights. Its attention writes the scores out, as
libraries did when the documents were written. `training_table.py` has the claims.
"""

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from pytracer.lab.claims.experiment import Lab, experiment, spread

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
        """The recipe for this device. A CPU's autocast has bf16, which stands in for fp16."""
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
    """The configuration of bert-large-uncased, or a small one that a CPU trains in seconds."""
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
    """Random tokens and labels, like the documents' `dummy_data`."""
    length = lab.pick(128, 512)
    vocabulary = configuration(lab.scale).vocab_size
    tokens = torch.randint(100, vocabulary, (count, length))
    labels = torch.randint(0, 2, (count,))
    return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]


# ---------------------------------------------------------------------- the two ways to train


def with_trainer(lab: Lab, recipe: Recipe, net: Any, steps: int, ended: Callable[[], None]) -> Any:
    """Trains with Hugging Face's Trainer. Calls `ended` after each optimizer step.

    Returns the objects that a script still holds when it asks how much memory is in use.
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
        max_grad_norm=0.0,  # A2 compares this with the documents' loop, which does not clip
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
    """Trains with the loop that the documents print. Calls `ended` after each optimizer step."""
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
    """The documents pass their own optimizer, because the Trainer's keeps embeddings in 32 bits."""
    import bitsandbytes

    return bitsandbytes.optim.Adam8bit(net.parameters(), lr=5e-5)


def _checkpointing_options(arguments: Any, recipe: Recipe) -> dict[str, Any]:
    """Version 5 of transformers has a new name for checkpointing. Version 6 drops the old one."""
    known = inspect.signature(arguments).parameters
    name = "activation_checkpointing"
    name = name if name in known else "gradient_checkpointing"
    options = {"use_reentrant": False}
    return {name: True, f"{name}_kwargs": options} if recipe.checkpointing else {}


Way = Callable[[Lab, Recipe, Any, int, Callable[[], None]], Any]


def table_row(lab: Lab, recipe: Recipe, way: Way = with_trainer) -> dict[str, Any]:
    """The figures of a row: memory by category from a traced run, times from another run."""
    recipe = recipe.on(lab.device)
    torch.set_float32_matmul_precision("high" if recipe.precision == "tf32" else "highest")
    with lab.traced("training"):
        net = model(lab.scale)
        parameters = sum(p.numel() for p in net.parameters())
        # The gradient scaler of fp16 may skip the first steps.
        held = way(lab, recipe, net, 5, lambda: None)
    # The timed run needs a new model: the Trainer and Accelerate have wrapped this one.
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
    step_seconds = [b - a for a, b in pairwise(moments[lab.pick(1, 3) :])]
    samples = recipe.batch * recipe.accumulation
    figures = lab.figures("training") | spread("step_s", step_seconds)
    figures |= spread("samples_per_s", [samples / each for each in step_seconds])
    figures["batch"] = recipe.batch
    figures["precision"] = recipe.precision
    figures["parameters"] = parameters
    figures["sequences_timed"] = samples * len(step_seconds)
    figures["at_512_sequences_s"] = 512 / figures["samples_per_s"]
    return figures


def _register() -> None:
    """Makes `trainer_NAME` of each recipe, and `accelerate_all`."""
    for name, recipe in RECIPES.items():
        needs = (*_NEEDS, "bitsandbytes") if "8bit" in name else _NEEDS
        gpus = 1 if "8bit" in name or name == "tf32" else 0
        experiment(f"trainer_{name}", needs=needs, gpus=gpus)(partial(table_row, recipe=recipe))
    experiment("accelerate_all", needs=_NEEDS)(partial(table_row, recipe=_ALL, way=with_accelerate))


_register()
