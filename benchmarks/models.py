"""The training steps that the benchmarks run: random weights, no downloads, only torch.

Each builder returns a `Workload`: a model, its optimizer and one training step as a user would
write it. Nothing in a step waits for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """The shape of a decoder-only transformer."""

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int


GPT2 = Config(vocabulary=50257, context=1024, width=768, layers=12, heads=12)  # 124M parameters
SMALL = Config(vocabulary=8192, context=256, width=512, layers=6, heads=8)
TINY = Config(vocabulary=256, context=64, width=64, layers=2, heads=4)


@dataclass
class Workload:
    """One training step, ready to run again and again."""

    name: str
    description: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], Any]


class Attention(nn.Module):
    """Causal self-attention, as GPT-2 has it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


class Mlp(nn.Module):
    """Two linear layers, four times as wide inside."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.act = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.act(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each on the normalised residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.mlp = Mlp(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        out: torch.Tensor = x + self.mlp(self.norm_2(x))
        return out


class Transformer(nn.Module):
    """Decoder-only, with the output layer tied to the token embedding. Returns the loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        where = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(where)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def gpt2(device: str = "cuda", batch: int = 16, length: int = 1024) -> Workload:
    """GPT-2 124M under bf16 autocast, AdamW fused. The host limits small batches."""
    torch.manual_seed(0)
    model = Transformer(GPT2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(GPT2.vocabulary, (batch, length), device=device)
    targets = torch.randint(GPT2.vocabulary, (batch, length), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(ids, targets)
        loss.backward()
        optimizer.step()

    return Workload(
        f"gpt2-{batch}x{length}",
        f"GPT-2 124M, {batch}x{length}, bf16 autocast, AdamW fused, {device}",
        model,
        optimizer,
        step,
    )


def compiled_gpt2(device: str = "cuda", layers: int = 6) -> Workload:
    """transformers' GPT-2, compiled.

    Up to 5.17 its layers call `super().__call__`. Dynamo's guards there must stay valid.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, __version__

    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model)
    ids = torch.randint(config.vocab_size, (1, 64), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = compiled(ids, labels=ids).loss
        loss.backward()
        optimizer.step()

    return Workload(
        "compiled-gpt2",
        f"GPT-2 of transformers {__version__}, {layers} layers, 1x64, torch.compile, bf16 autocast,"
        f" AdamW fused, {device}",
        model,
        optimizer,
        step,
    )


def bert_large(device: str = "cuda") -> Workload:
    """transformers' BERT-large, one sequence of 512 tokens: 24 layers of small kernels."""
    from transformers import BertConfig, BertForMaskedLM, __version__

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    model = BertForMaskedLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(config.vocab_size, (1, 512), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()

    return Workload(
        "bert-large-1x512",
        f"BERT-large of transformers {__version__}, 1x512, bf16 autocast, AdamW fused, {device}",
        model,
        optimizer,
        step,
    )


def resnet50(device: str = "cuda", batch: int = 8) -> Workload:
    """torchvision's ResNet-50 with mixed precision and a gradient scaler."""
    from torchvision.models import resnet50 as build

    torch.manual_seed(0)
    model = build().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    images = torch.randn(batch, 3, 224, 224, device=device)
    targets = torch.randint(1000, (batch,), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.float16):
            loss = functional.cross_entropy(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return Workload(
        f"resnet50-{batch}",
        f"ResNet-50, batch {batch}, fp16 autocast, SGD, {device}; the scaler waits for the GPU",
        model,
        optimizer,
        step,
    )


def actor_and_critic(device: str = "cuda", moves: int = 16) -> Workload:
    """A loop of reinforcement learning: two tiny networks, called once per move."""
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)).to(device)
    critic = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    both = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizer = torch.optim.Adam(both.parameters(), lr=1e-3)
    world = torch.randn(4, 8, 8, device=device) / 8
    begin = torch.randn(32, 8, device=device)

    def step() -> None:
        state, states, actions, rewards = begin, [], [], []
        with torch.no_grad():
            for _ in range(moves):
                action = torch.distributions.Categorical(
                    logits=actor(state), validate_args=False
                ).sample()
                states.append(state)
                actions.append(action)
                state = torch.bmm(state[:, None], world[action])[:, 0]
                rewards.append(state.sum(1))
        seen, values = torch.cat(states), critic(torch.cat(states))[:, 0]
        gain = torch.cat(rewards) - values
        chosen = functional.log_softmax(actor(seen), 1).gather(1, torch.cat(actions)[:, None])[:, 0]
        optimizer.zero_grad()
        (gain.square().mean() - (gain.detach() * chosen).mean()).backward()
        optimizer.step()

    return Workload(
        "reinforcement",
        f"actor and critic of width 64, {moves} moves and an update, Adam, {device}",
        both,
        optimizer,
        step,
    )


def llama_generate(device: str = "cuda", tokens: int = 16) -> Workload:
    """A small Llama of transformers generates text: no gradients, a growing cache."""
    from transformers import LlamaConfig, LlamaForCausalLM, __version__

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    prompt = torch.randint(config.vocab_size, (1, 32), device=device)

    def step() -> None:
        model.generate(
            prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )

    return Workload(
        "llama-generate",
        f"Llama of transformers {__version__}, 8 layers of width 512, generates {tokens} tokens,"
        f" bf16, {device}",
        model,
        optimizer,
        step,
    )


def tiny(batch: int = 4, length: int = 32) -> Workload:
    """A transformer so small that a step on the CPU is mostly dispatch: the worst case."""
    torch.manual_seed(0)
    model = Transformer(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(TINY.vocabulary, (batch, length))
    targets = torch.randint(TINY.vocabulary, (batch, length))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()

    return Workload(
        "tiny-cpu",
        f"transformer, {TINY.layers} layers of width {TINY.width}, {batch}x{length}, AdamW, CPU",
        model,
        optimizer,
        step,
    )


def ddp(device: str = "cuda") -> Workload:
    """A small GPT-2 in DistributedDataParallel. The group of processes is there already."""
    torch.manual_seed(0)
    config = SMALL if device == "cuda" else TINY
    model = nn.parallel.DistributedDataParallel(Transformer(config).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    batch, length = 4, config.context // 2
    ids = torch.randint(config.vocabulary, (batch, length), device=device)
    targets = torch.randint(config.vocabulary, (batch, length), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model(ids, targets)
        loss.backward()
        optimizer.step()

    return Workload(
        "ddp",
        f"transformer, {config.layers} layers of width {config.width}, {batch}x{length} a rank,"
        f" {torch.distributed.get_world_size()} ranks of DistributedDataParallel,"
        f" {torch.distributed.get_backend()}, AdamW, {device}",
        model,
        optimizer,
        step,
    )
