"""Small training programs, recorded by pytracer and as memory snapshots: see snapshots.py beside it."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.imagine_programs import (
    GPT2,
    LLAMA,
    UNet,
    adafactor,
    adamw,
    adapted,
    by,
    fused,
    images,
    loop,
    momentum,
    of,
    words,
)

STEPS = 3
Program = Callable[[str], Any]  # returns what the program still has at its end
Batch = Callable[[str], dict[str, Any]]
Make = Callable[[], nn.Module]


def trains(
    make: Make,
    batch: Batch,
    optimizer: Callable[[Any], Any] = adamw,
    *,
    amp: bool = False,
    dtype: torch.dtype | None = None,
    checkpoint: bool = False,
    micro: int = 1,
    scaler: bool = False,
    average: bool = False,
    evaluates: bool = False,
    frozen: str = "",
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Program:
    """Returns a program of a few steps, as people write them."""

    def program(device: str) -> Any:
        torch.manual_seed(0)
        model = make().to(device=device, dtype=dtype).train()
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        for name, weight in model.named_parameters():
            if frozen and name.startswith(frozen):
                weight.requires_grad_(False)
        model = wrap(model)
        averaged = torch.optim.swa_utils.AveragedModel(model) if average else None
        updates = optimizer(model)
        scales = torch.amp.GradScaler(device, enabled=scaler)
        half = torch.float16 if scaler else torch.bfloat16
        for _ in range(STEPS):
            for _ in range(micro):
                given = batch(device)
                with torch.autocast(device, dtype=half, enabled=amp or scaler):
                    result = model(**given)
                    loss = result["loss"] if isinstance(result, dict) else result
                scales.scale(loss / micro).backward()
            if scaler:
                scales.unscale_(updates)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scales.step(updates)
            scales.update()
            updates.zero_grad()
            if averaged is not None:
                averaged.update_parameters(model)
            if evaluates:
                model.eval()
                with torch.no_grad():
                    (averaged or model)(**batch(device))
                model.train()
        return model, updates, averaged, given, result

    return program


def adversarial(device: str) -> Any:
    """Two networks against each other, each with its optimizer."""
    maker = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 2048)).to(device)
    judge = nn.Sequential(nn.Linear(2048, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 1)).to(device)
    of_maker = torch.optim.Adam(maker.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for _ in range(STEPS):
        seen = torch.randn(1024, 2048, device=device)
        noise = torch.randn(1024, 128, device=device)
        made = maker(noise)
        of_judge.zero_grad()
        loss_of_judge = functional.softplus(-judge(seen)).mean()
        loss_of_judge = loss_of_judge + functional.softplus(judge(made.detach())).mean()
        loss_of_judge.backward()
        of_judge.step()
        of_maker.zero_grad()
        loss_of_maker = functional.softplus(-judge(made)).mean()
        loss_of_maker.backward()
        of_maker.step()
    return maker, judge, of_maker, of_judge


def generation(device: str) -> Any:
    """A language model that writes, with a cache of keys and values."""
    sizes = {**SMALL_LLAMA, "use_cache": True}
    model: Any = of(*LLAMA, **sizes)().to(device).eval()
    ids = torch.randint(8000, (8, 64), device=device)
    cache = None
    with torch.no_grad():
        new = ids
        for _ in range(24):
            given = model(input_ids=new, past_key_values=cache, use_cache=True)
            cache = given.past_key_values
            new = given.logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, new], 1)
    return model, ids, cache


class Policy(nn.Module):
    """Actions and values of states."""

    def __init__(self) -> None:
        """Makes a trunk and two heads."""
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh())
        self.actor, self.critic = nn.Linear(1024, 18), nn.Linear(1024, 1)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits and values."""
        hidden = self.trunk(states)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def reinforcement(device: str) -> Any:
    """Acts without gradients, then learns from what it has seen (PPO)."""
    policy = Policy().to(device)
    updates = torch.optim.Adam(policy.parameters(), lr=3e-4, eps=1e-5)
    for _ in range(STEPS):
        states, actions, chances, values = [], [], [], []
        for _ in range(16):
            state = torch.randn(256, 64, device=device)
            with torch.no_grad():
                logits, value = policy(state)
            chance = functional.log_softmax(logits, -1)
            action = torch.randint(18, (256, 1), device=device)
            states.append(state)
            actions.append(action)
            chances.append(chance.gather(1, action))
            values.append(value)
        every = [torch.cat(one) for one in (states, actions, chances, values)]
        returns = every[3] + torch.randn(every[3].shape, device=device)
        for _ in range(2):
            for part in range(4):
                piece = slice(part * 1024, (part + 1) * 1024)
                logits, value = policy(every[0][piece])
                now = functional.log_softmax(logits, -1).gather(1, every[1][piece])
                ratio = (now - every[2][piece]).exp()
                gain = (returns[piece] - every[3][piece]).unsqueeze(1)
                loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                loss = loss + 0.5 * (value - returns[piece]).square().mean()
                updates.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                updates.step()
    return policy, updates


class Classifier(nn.Module):
    """A classifier as in a tutorial."""

    def __init__(self) -> None:
        """Makes a few layers."""
        super().__init__()
        self.first = nn.Linear(3072, 1024)
        self.body = nn.Sequential(
            *(part for _ in range(3) for part in (nn.ReLU(), nn.Linear(1024, 1024)))
        )
        self.head = nn.Linear(1024, 100)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        return functional.cross_entropy(
            self.head(self.body(self.first(pixel_values.flatten(1)))), labels
        )


class OwnAdam(torch.optim.Optimizer):
    """As a course has one write it: the state is made in the step, by the program's own code."""

    def __init__(self, parameters: Any) -> None:
        """Has one group."""
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Goes over all parameters."""
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            mean = state.get("mean", torch.zeros_like(p))
            square = state.get("square", torch.zeros_like(p))
            state["mean"] = 0.9 * mean + 0.1 * p.grad
            state["square"] = 0.99 * square + 0.01 * p.grad**2
            p -= 1e-3 * state["mean"] / (state["square"].sqrt() + 1e-8)


class Words(nn.Module):
    """A language model with torch's LSTM."""

    def __init__(self) -> None:
        """Makes an embedding, two layers and a head."""
        super().__init__()
        self.words = nn.Embedding(4000, 256)
        self.layers = nn.LSTM(256, 512, 2, batch_first=True)
        self.head = nn.Linear(512, 4000)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        logits = self.head(self.layers(self.words(input_ids))[0])
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def compiled(model: nn.Module) -> nn.Module:
    """As torch.compile makes it."""
    found: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return found


def sharded(device: str) -> Any:
    """FSDP2 on the ranks that there are."""
    from torch.distributed import fsdp

    with _group(device):
        model: Any = of(*LLAMA, **SMALL_LLAMA)().to(device)
        for layer in model.model.layers:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
        updates = adamw(model)
        batch = words(8000, 4, 256)
        for _ in range(STEPS):
            loss = model(**batch(device))["loss"]
            loss.backward()
            updates.step()
            updates.zero_grad()
        return model, updates


def replicated(device: str) -> Any:
    """DistributedDataParallel on the ranks that there are."""

    def wrap(model: nn.Module) -> nn.Module:
        places = [torch.cuda.current_device()] if device == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=places)

    with _group(device):
        train = trains(of(*GPT2, **SMALL_GPT2), words(8000, 8, 256), adamw, amp=True, wrap=wrap)
        return train(device)


class _group:  # noqa: N801 - reads as a verb
    """The ranks that a launcher has started; one, if there is none."""

    def __init__(self, device: str) -> None:
        self.backend = "nccl" if device == "cuda" else "gloo"

    def __enter__(self) -> None:
        if "RANK" in os.environ:
            torch.distributed.init_process_group(self.backend)
        else:
            alone = torch.distributed.HashStore()
            torch.distributed.init_process_group(self.backend, store=alone, rank=0, world_size=1)

    def __exit__(self, *error: object) -> None:
        torch.distributed.destroy_process_group()


def hugging_face(device: str) -> Any:
    """Trained by transformers' Trainer."""
    import transformers

    ids = torch.arange(256 * 32).reshape(32, 256) % 8000
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=device == "cpu",
        )
        data = [{"input_ids": row, "labels": row} for row in ids]
        model = of(*GPT2, **SMALL_GPT2)()
        trainer = transformers.Trainer(model=model, args=options, train_dataset=data)
        trainer.train()
    return trainer


def by_lightning(device: str) -> Any:
    """Trained by Lightning's Trainer."""
    import lightning

    class Learner(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Classifier()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            pixels, labels = batch
            loss: torch.Tensor = self.inner(pixels, labels)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.inner.parameters(), foreach=True)

    pixels, labels = torch.randn(STEPS * 256, 3, 32, 32), torch.arange(STEPS * 256) % 100
    data = torch.utils.data.TensorDataset(pixels, labels)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=STEPS,
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # Lightning would take the model from the device, and let go of cuBLAS's workspaces.
        trainer.strategy.teardown = lambda: None  # type: ignore[method-assign]
        learner = Learner()
        trainer.fit(learner, torch.utils.data.DataLoader(data, batch_size=256))
    return trainer, learner


SMALL_GPT2: dict[str, Any] = {
    "n_embd": 256,
    "n_head": 8,
    "n_layer": 4,
    "vocab_size": 8000,
    "use_cache": False,
}
SMALL_LLAMA: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "use_cache": False,
}
SMALL_T5: dict[str, Any] = {"d_model": 256, "d_ff": 1024, "num_layers": 3, "vocab_size": 8000}
SMALL_VIT: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
SMALL_RESNET: dict[str, Any] = {
    "embedding_size": 32,
    "hidden_sizes": [64, 128, 256, 512],
    "depths": [2, 2, 2, 2],
}

PROGRAMS: dict[str, Program] = {
    "GPT-2, AdamW": trains(of(*GPT2, **SMALL_GPT2), words(8000, 8, 256)),
    "Llama, AMP, fused AdamW": trains(
        of(*LLAMA, **SMALL_LLAMA), words(8000, 4, 256), fused, amp=True
    ),
    "Llama, AMP, accumulation": trains(
        of(*LLAMA, **SMALL_LLAMA), words(8000, 4, 256), amp=True, micro=3
    ),
    # Without dropout: torch 2.11 with a history cannot end a checkpoint inside of it (pytorch#179536).
    "GPT-2, checkpointed": trains(
        of(*GPT2, **SMALL_GPT2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
        words(8000, 8, 256),
        fused,
        checkpoint=True,
    ),
    "Llama, LoRA, bfloat16, checkpointed": trains(
        adapted(of(*LLAMA, **SMALL_LLAMA)),
        words(8000, 4, 256),
        dtype=torch.bfloat16,
        checkpoint=True,
    ),
    "Llama, fp16 with a scaler": trains(
        of(*LLAMA, **SMALL_LLAMA), words(8000, 4, 256), scaler=True
    ),
    "T5, Adafactor": trains(
        of("T5ForConditionalGeneration", "T5Config", **SMALL_T5, decoder_start_token_id=0),
        words(8000, 8, 128),
        adafactor,
    ),
    "ViT, AMP, RMSprop": trains(
        of("ViTForImageClassification", "ViTConfig", **SMALL_VIT, num_labels=1000),
        images(16, 224),
        by("RMSprop", momentum=0.9),
        amp=True,
    ),
    "ResNet, SGD with momentum": trains(
        of("ResNetForImageClassification", "ResNetConfig", **SMALL_RESNET, num_labels=1000),
        images(16, 128),
        momentum,
    ),
    "U-Net, AMP, AdamW": trains(lambda: UNet(32), images(8, 128), amp=True),
    "LSTM, Adam in a loop": trains(Words, words(4000, 16, 64), loop),
    "ResNet, average of weights": trains(
        of("ResNetForImageClassification", "ResNetConfig", **SMALL_RESNET, num_labels=1000),
        images(16, 128),
        momentum,
        average=True,
        evaluates=True,
    ),
    "Classifier, SGD, evaluations": trains(
        Classifier, images(256, 32, 100), by("SGD", lr=0.1), evaluates=True
    ),
    "Classifier, own optimizer": trains(
        Classifier, images(256, 32, 100), lambda model: OwnAdam(model.parameters())
    ),
    "ViT, frozen layers": trains(
        of("ViTForImageClassification", "ViTConfig", **SMALL_VIT, num_labels=1000),
        images(16, 224),
        frozen="vit.",
    ),
    "GPT-2, compiled": trains(of(*GPT2, **SMALL_GPT2), words(8000, 8, 256), wrap=compiled),
    "GPT-2, Trainer": hugging_face,
    "Classifier, Lightning": by_lightning,
    "Two networks against each other": adversarial,
    "Generation": generation,
    "Reinforcement learning": reinforcement,
    "GPT-2, DDP, AMP": replicated,
    "Llama, FSDP2": sharded,
}
