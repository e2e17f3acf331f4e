"""Training steps that are run on a GPU and imagined: benchmarks/imagine.py compares the two."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

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

# ---------------------------------------------------------------- other ways to train


class Attention(nn.Module):
    """A stack of attention layers by torch's own function, with a mask or a backend."""

    def __init__(self, *, masked: bool = False, backend: SDPBackend | None = None) -> None:
        """Makes four layers of eight heads."""
        super().__init__()
        self.masked, self.backend = masked, backend
        self.words = nn.Embedding(8000, 512)
        self.layers = nn.ModuleList([nn.Linear(512, 3 * 512) for _ in range(4)])
        self.head = nn.Linear(512, 8000)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        x = self.words(input_ids)
        rows, length, _ = x.shape
        mask = torch.zeros(1, 1, length, length, device=x.device) if self.masked else None
        for layer in self.layers:
            parts = layer(x).view(rows, length, 3, 8, 64).permute(2, 0, 3, 1, 4).unbind()
            if mask is not None:
                mask = mask.to(parts[0].dtype)
            with sdpa_kernel(self.backend or [*_BACKENDS]):
                found = functional.scaled_dot_product_attention(*parts, attn_mask=mask)
            x = x + found.transpose(1, 2).reshape(rows, length, 512)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


_BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)


class Encoder(nn.Module):
    """torch's own transformer layers, with dropout."""

    def __init__(self) -> None:
        """Makes six layers."""
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.1, "gelu", batch_first=True)
        self.words = nn.Embedding(8000, 512)
        self.layers = nn.TransformerEncoder(layer, 6)
        self.head = nn.Linear(512, 8000)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        logits = self.head(self.layers(self.words(input_ids)))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Clicks(nn.Module):
    """A recommender: large tables, and a small network."""

    def __init__(self) -> None:
        """Makes eight tables."""
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(100_000, 64) for _ in range(8)])
        self.net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss; the tables share the words."""
        found = torch.cat([table(input_ids) for table in self.tables], 1)
        wanted = (labels[:, :1] % 2).float()
        return functional.binary_cross_entropy_with_logits(self.net(found), wanted)


class Layers(nn.Module):
    """A wide perceptron, for what optimizers need."""

    def __init__(self, activation: type[nn.Module] = nn.SiLU) -> None:
        """Makes six layers."""
        super().__init__()
        self.words = nn.Embedding(1000, 1024)
        self.net = nn.Sequential(
            *(part for _ in range(6) for part in (nn.Linear(1024, 1024), activation()))
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        return self.net(self.words(input_ids)).square().mean() + 0 * labels.sum()


class TwoWays(nn.Module):
    """A recurrent layer in both directions, with dropout between its two levels."""

    def __init__(self, kind: type[nn.Module]) -> None:
        """`kind`: nn.LSTM or nn.GRU."""
        super().__init__()
        self.words = nn.Embedding(10000, 256)
        self.layers = kind(256, 512, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(1024, 1000)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        logits = self.head(self.layers(self.words(input_ids))[0])
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten() % 1000)


def by(name: str, **options: Any) -> Callable[[nn.Module], Any]:
    """Returns what makes an optimizer of torch."""

    def optimizer(model: nn.Module) -> Any:
        return getattr(torch.optim, name)(model.parameters(), **options)

    return optimizer


def adapted(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Returns the model with adapters of peft's, and frozen weights."""

    def adapt() -> nn.Module:
        import peft

        model: Any = make()
        model.enable_input_require_grads()
        shape = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
        wrapped: nn.Module = peft.get_peft_model(model, shape)
        return wrapped

    return adapt


def scaled(make: Callable[[], nn.Module], batch: Callable[[str], dict[str, Any]]) -> Program:
    """Trains in float16, with a scaler and clipped gradients."""

    def program(device: str) -> None:
        torch.manual_seed(0)
        model = make().to(device).train()
        updates, scaler = adamw(model), torch.amp.GradScaler(device)
        for _ in range(STEPS):
            with torch.autocast(device, dtype=torch.float16):
                given = model(**batch(device))
                loss = given["loss"] if isinstance(given, dict) else given
            del given
            scaler.scale(loss).backward()
            del loss
            scaler.unscale_(updates)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(updates)
            scaler.update()
            updates.zero_grad()

    return program


def averaged(make: Callable[[], nn.Module], batch: Callable[[str], dict[str, Any]]) -> Program:
    """Trains with a moving average of the weights."""

    def program(device: str) -> None:
        torch.manual_seed(0)
        model = make().to(device).train()
        average = torch.optim.swa_utils.AveragedModel(model)
        updates = momentum(model)
        for _ in range(STEPS):
            loss = model(**batch(device))
            loss = loss["loss"] if isinstance(loss, dict) else loss
            loss.backward()
            del loss
            updates.step()
            updates.zero_grad()
            average.update_parameters(model)

    return program


def adversarial(device: str) -> None:
    """Two networks against each other, each with its optimizer."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 4096)).to(device)
    judge = nn.Sequential(nn.Linear(4096, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 1)).to(device)
    of_maker, of_judge = adamw(maker), adamw(judge)
    for _ in range(STEPS):
        seen = torch.randn(2048, 4096, device=device)
        made = maker(torch.randn(2048, 128, device=device))
        loss = judge(made.detach()).mean() - judge(seen).mean()
        loss.backward()
        of_judge.step()
        of_judge.zero_grad()
        loss = -judge(made).mean()
        loss.backward()
        of_maker.step()
        of_maker.zero_grad()
        of_judge.zero_grad()
        del loss, made, seen


SMALL = {"num_hidden_layers": 4}
MORE: dict[str, Program] = {
    "Qwen3, AMP, AdamW": trains(
        of("Qwen3ForCausalLM", "Qwen3Config", **{**LLAMA_SIZES, "head_dim": 64}),
        words(32000, 4, 512),
        amp=True,
    ),
    "Mistral, bfloat16, fused AdamW": trains(
        of("MistralForCausalLM", "MistralConfig", **LLAMA_SIZES, sliding_window=256),
        words(32000, 4, 512),
        fused,
        dtype=torch.bfloat16,
    ),
    "Gemma 2, bfloat16, SGD": trains(
        of("Gemma2ForCausalLM", "Gemma2Config", **{**LLAMA_SIZES, "head_dim": 64}),
        words(32000, 2, 512),
        momentum,
        dtype=torch.bfloat16,
    ),
    "Phi-3, AMP, checkpointed": trains(
        of("Phi3ForCausalLM", "Phi3Config", **LLAMA_SIZES, pad_token_id=0),
        words(32000, 4, 512),
        fused,
        amp=True,
        checkpoint=True,
    ),
    "OPT, fp32, AdamW": trains(
        of("OPTForCausalLM", "OPTConfig", **SMALL, use_cache=False), words(50272, 4, 256)
    ),
    "GPT-NeoX, AMP, fused AdamW": trains(
        of(
            "GPTNeoXForCausalLM",
            "GPTNeoXConfig",
            hidden_size=1024,
            intermediate_size=4096,
            num_attention_heads=16,
            num_hidden_layers=4,
            use_cache=False,
        ),
        words(50432, 4, 512),
        fused,
        amp=True,
    ),
    "Llama, bfloat16, LoRA, checkpointed": trains(
        adapted(of(*LLAMA, **LLAMA_SIZES)),
        words(32000, 4, 512),
        dtype=torch.bfloat16,
        checkpoint=True,
    ),
    "Llama, fp16 with a scaler": scaled(of(*LLAMA, **LLAMA_SIZES), words(32000, 4, 512)),
    "MoE (Qwen3), AMP, SGD": trains(
        of(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            hidden_size=512,
            moe_intermediate_size=512,
            num_experts=8,
            num_experts_per_tok=2,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=64,
            vocab_size=32000,
            use_cache=False,
        ),
        words(32000, 4, 256),
        momentum,
        amp=True,
    ),
    "BART, AMP, AdamW": trains(
        of("BartForConditionalGeneration", "BartConfig", encoder_layers=4, decoder_layers=4),
        words(50265, 4, 256),
        amp=True,
    ),
    "T5, AMP, AdamW": trains(
        of("T5ForConditionalGeneration", "T5Config", num_layers=4, decoder_start_token_id=0),
        words(32128, 8, 256),
        amp=True,
    ),
    "DistilBERT, fp16 with a scaler": scaled(
        of("DistilBertForMaskedLM", "DistilBertConfig"), words(30522, 8, 256)
    ),
    "Swin, AMP, AdamW": trains(
        of("SwinForImageClassification", "SwinConfig", num_labels=1000),
        images(16, 224),
        amp=True,
    ),
    "BEiT, AMP, AdamW": trains(
        of("BeitForImageClassification", "BeitConfig", **SMALL, num_labels=1000),
        images(16, 224),
        amp=True,
    ),
    "Attention, a float mask of odd length": trains(
        lambda: Attention(masked=True), words(8000, 8, 333), amp=True
    ),
    "Attention, MATH, fp32": trains(
        lambda: Attention(backend=SDPBackend.MATH), words(8000, 4, 512)
    ),
    "Attention, MATH, AMP": trains(
        lambda: Attention(backend=SDPBackend.MATH), words(8000, 4, 512), amp=True
    ),
    "Attention, bfloat16, no mask": trains(Attention, words(8000, 8, 512), dtype=torch.bfloat16),
    "TransformerEncoder with dropout, AMP": trains(Encoder, words(8000, 8, 384), amp=True),
    "Recommender, SGD": trains(Clicks, words(100_000, 4096, 8), by("SGD", lr=0.1)),
    "Recommender, Adagrad": trains(Clicks, words(100_000, 4096, 8), by("Adagrad")),
    "Perceptron, NAdam": trains(Layers, words(1000, 32, 64), by("NAdam")),
    "Perceptron, RMSprop": trains(Layers, words(1000, 32, 64), by("RMSprop", momentum=0.9)),
    "Perceptron, fused SGD": trains(
        Layers, words(1000, 32, 64), by("SGD", lr=0.1, momentum=0.9, fused=True)
    ),
    "Perceptron, Mish, bfloat16": trains(
        lambda: Layers(nn.Mish), words(1000, 32, 64), dtype=torch.bfloat16
    ),
    "Two networks against each other": adversarial,
    "MobileNet, fp32, average of weights": averaged(
        of("MobileNetV2ForImageClassification", "MobileNetV2Config", num_labels=1000),
        images(32, 224),
    ),
    "EfficientNet, AMP, AdamW": trains(
        of("EfficientNetForImageClassification", "EfficientNetConfig", num_labels=1000),
        images(8, 224),
        amp=True,
    ),
    "LSTM in both directions, dropout": trains(lambda: TwoWays(nn.LSTM), words(10000, 16, 128)),
    "GRU in both directions, dropout": trains(lambda: TwoWays(nn.GRU), words(10000, 16, 128)),
}
PROGRAMS = TRANSFORMERS | OTHERS | MORE
