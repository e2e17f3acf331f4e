"""Programs of real libraries, imagined beside their real run on this machine's CPU."""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pytracer
from pytracer import errors
from pytracer.analysis.facts.doubts import doubts
from pytracer.imagined import huggingface

# peft asks transformers by a name that is to go.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300}


@pytest.fixture(autouse=True)
def _nothing_alive() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # collections within the test are of its own
    yield
    gc.collect()


def steps(model: nn.Module, loss: Callable[[], torch.Tensor], many: int = 2) -> None:
    """Trains what can be trained."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    for _ in range(many):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def llama(**more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, num_attention_heads=4, **more)
    )


def lora(device: str, folder: Path) -> None:
    """Adapters of peft's on all linear layers."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, target_modules="all-linear")
    model = peft.get_peft_model(llama(), config).to(device)

    def loss() -> torch.Tensor:
        words = torch.randint(300, (4, 16), device=device)
        result: torch.Tensor = model(input_ids=words, labels=words).loss
        return result

    steps(model, loss)


def trainer(device: str, folder: Path) -> None:
    """Trainer, with accumulation, checkpoints and mixed precision."""
    transformers = pytest.importorskip("transformers")
    words = [torch.randint(300, (16,)) for _ in range(16)]
    options = transformers.TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        bf16=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=device == "cpu",
    )
    data = [{"input_ids": one, "labels": one} for one in words]
    transformers.Trainer(model=llama(), args=options, train_dataset=data).train()


def sequences(device: str, folder: Path) -> None:
    """Seq2SeqTrainer, which generates in its evaluations."""
    transformers = pytest.importorskip("transformers")
    shape = transformers.T5Config(
        vocab_size=300, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4
    )
    shape.decoder_start_token_id = 0
    data = [
        {"input_ids": torch.randint(1, 300, (16,)), "labels": torch.randint(1, 300, (8,))}
        for _ in range(8)
    ]
    options = transformers.Seq2SeqTrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        predict_with_generate=True,
        generation_max_length=6,
        eval_strategy="steps",
        eval_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=device == "cpu",
    )
    transformers.Seq2SeqTrainer(
        model=transformers.T5ForConditionalGeneration(shape),
        args=options,
        train_dataset=data,
        eval_dataset=data[:4],
        compute_metrics=lambda _: {},
    ).train()


def accelerated(device: str, folder: Path) -> None:
    """Accelerate, with accumulation and clipping."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=device == "cpu", gradient_accumulation_steps=2)
    model: Any = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    rows = torch.utils.data.TensorDataset(torch.randn(32, 32), torch.randint(0, 4, (32,)))
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, label in loader:
        with accelerator.accumulate(model):
            accelerator.backward(functional.cross_entropy(model(x), label))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def diffusion(device: str, folder: Path) -> None:
    """A U-Net of diffusers, with its own noise."""
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ).to(device)
    schedule = diffusers.DDPMScheduler(num_train_timesteps=100)

    def loss() -> torch.Tensor:
        images = torch.randn(4, 3, 32, 32, device=device)
        noise, times = torch.randn_like(images), torch.randint(0, 100, (4,), device=device)
        guess = model(schedule.add_noise(images, noise, times), times).sample
        return functional.mse_loss(guess, noise)

    steps(model, loss)


class Actor(nn.Module):
    """A policy and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(8, 64), nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.policy(hidden), self.value(hidden)[:, 0]


def actor_critic(device: str, folder: Path) -> None:
    """Rollouts by torch.distributions, which checks its arguments by value."""
    model = Actor().to(device)

    def loss() -> torch.Tensor:
        seen, chances, values, rewards = torch.zeros(16, 8, device=device), [], [], []
        kept = torch.zeros(5, 16, device=device)  # of another type than samples
        for _ in range(5):
            logits, value = model(seen)
            choice = torch.distributions.Categorical(logits=logits)
            kept[len(chances)] = choice.sample()
            chances.append(choice.log_prob(kept.long()[len(chances)]))
            values.append(value)
            seen = seen + torch.randn_like(seen)
            rewards.append(torch.tanh(seen.sum(-1)))
        gain = torch.stack(rewards).flip(0).cumsum(0).flip(0) - torch.stack(values)
        return -(torch.stack(chances) * gain.detach()).mean() + gain.pow(2).mean()

    steps(model, loss)


def reentrant(device: str, folder: Path) -> None:
    """Checkpoints of the older kind, which keep the generator's state."""
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
        for _ in range(3)
    ).to(device)

    def loss() -> torch.Tensor:
        x = torch.randn(512, 64, device=device, requires_grad=True)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x.sum()

    steps(blocks, loss)


@pytest.mark.ci
@pytest.mark.parametrize(
    "program",
    [lora, trainer, sequences, accelerated, diffusion, actor_critic, reentrant],
    ids=lambda program: program.__name__,
)
def test_a_program_of_a_library_needs_what_it_really_takes(
    program: Callable[[str, Path], None], tmp_path: Path
) -> None:
    """On the CPU as the real run takes; and it goes through on a card."""
    with pytracer.trace(devices="cpu", table=False) as real:
        program("cpu", tmp_path)
    gc.collect()
    with pytracer.imagine("cpu") as guess:
        program("cpu", tmp_path)
    assert guess.peak.bytes == pytest.approx(real.peak.bytes, rel=0.02)
    for category in ("weights", "optimizer_state"):
        assert guess.peak.by_category[category] == real.peak.by_category[category], category
    assert set(guess.peaks().index) == set(real.peaks().index)
    assert ("generation" in guess.peaks().index) == (program is sequences)
    gc.collect()
    with pytracer.imagine("H100") as card:
        program("cuda", tmp_path)
    assert card.peak.device == "cuda:0"
    assert card.peak.by_category["optimizer_state"] > 0
    assert not doubts(card.data)


@pytest.mark.ci
def test_an_optimizer_with_8_bits_takes_a_quarter(tmp_path: Path) -> None:
    """torchao's: it compiles its step, which the table says."""
    optim = pytest.importorskip("torchao.optim")
    with pytracer.imagine("H100") as t:
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to("cuda")
        optimizer = optim.AdamW8bit(model.parameters())
        model(torch.randn(8, 256, device="cuda")).sum().backward()
        optimizer.step()
    weights = sum(one.nbytes for one in model.parameters())
    assert t.summary().at_end["optimizer_state"] == pytest.approx(2 * weights / 4, rel=0.1)


@pytest.mark.parametrize(
    ("package", "option", "ask"),
    [
        ("transformers", "--hf", lambda order: huggingface.train(order, 1)),
        ("peft", "--lora", lambda order: huggingface._with_lora(None, 8)),
        ("torchao", "--optimizer", lambda order: huggingface._optimizer("adamw8bit", nn.Module())),
    ],
)
def test_a_package_that_is_missing_is_one_sentence(
    package: str, option: str, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what to install."""
    for name in (package, f"{package}.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.UsageError, match=f"{option}.* needs {package}: pip install"):
        ask(huggingface.Order("nowhere"))
