"""Healthy programs: fine-tuning recipes of peft and trl, each with a tiny model and made-up texts."""

from pathlib import Path
from typing import Any

from programs.hints.healthy import healthy
from programs.hints.methods import HEALTHY
from pytracer import trace

__all__ = ["HEALTHY", "OF_TRL"]
OF_TRL = ("sft_with_lora", "dpo_with_lora", "a_reward_model", "grpo_with_a_reward")
_WORDS = [f"w{i}" for i in range(48)]


def _tokenizer() -> Any:
    """Words of a made-up language."""
    import tokenizers
    import transformers

    special = {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
    }
    words = {word: i for i, word in enumerate([*special.values(), *_WORDS])}
    of_words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    of_words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=of_words, **special)


def _config() -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, pad_token_id=1, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip


def _model() -> Any:
    import transformers

    return transformers.LlamaForCausalLM(_config())


def _lora(task: str = "CAUSAL_LM") -> Any:
    import peft

    return peft.LoraConfig(task_type=task, r=4, target_modules=["q_proj", "v_proj"])


def _text(first: int, count: int = 12) -> str:
    return " ".join(_WORDS[(first + i) % len(_WORDS)] for i in range(count))


def _data(*columns: str) -> Any:
    import datasets

    rows = [{name: _text(i + at) for at, name in enumerate(columns)} for i in range(32)]
    return datasets.Dataset.from_list(rows)


def _options(folder: Path, **more: Any) -> dict[str, Any]:
    given = {"output_dir": str(folder), "max_steps": 5, "per_device_train_batch_size": 4}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return {**given, **quiet, "bf16": False, **more}


def _trained(trainer: Any) -> trace:
    with trace(stacks=True, devices="cpu", table=False) as t:
        trainer.train()
    return t


@healthy
def sft_with_lora(folder: Path) -> trace:
    """Checkpoints, as trl has them by default."""
    import trl

    arguments = trl.SFTConfig(**_options(folder, max_length=32))
    return _trained(
        trl.SFTTrainer(
            _model(), arguments, train_dataset=_data("text"), processing_class=_tokenizer(),
            peft_config=_lora(),
        )
    )  # fmt: skip


@healthy
def dpo_with_lora(folder: Path) -> trace:
    """The reference is the model without its adapters."""
    import trl

    arguments = trl.DPOConfig(**_options(folder))
    return _trained(
        trl.DPOTrainer(
            _model(), args=arguments, train_dataset=_data("prompt", "chosen", "rejected"),
            processing_class=_tokenizer(), peft_config=_lora(),
        )
    )  # fmt: skip


@healthy
def a_reward_model(folder: Path) -> trace:
    import transformers
    import trl

    model = transformers.LlamaForSequenceClassification(_config())
    model.config.num_labels = 1
    return _trained(
        trl.RewardTrainer(
            model, trl.RewardConfig(**_options(folder)), train_dataset=_data("chosen", "rejected"),
            processing_class=_tokenizer(), peft_config=_lora("SEQ_CLS"),
        )
    )  # fmt: skip


@healthy
def grpo_with_a_reward(folder: Path) -> trace:
    """Groups of samples, and the reward is a function of the program."""
    import trl

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len({*text.split()})) for text in completions]

    arguments = trl.GRPOConfig(**_options(folder, max_completion_length=8, num_generations=4))
    return _trained(
        trl.GRPOTrainer(
            _model(), reward, arguments, train_dataset=_data("prompt"),
            processing_class=_tokenizer(), peft_config=_lora(),
        )
    )  # fmt: skip


@healthy
def lora_with_checkpoints_of_a_model(_: Path) -> trace:
    """peft without a trainer: `enable_input_require_grads` and transformers' checkpoints."""
    import peft
    import torch

    torch.manual_seed(0)
    model = _model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, _lora())
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    with trace(model, optimizer, stacks=True, devices="cpu", table=False) as t:
        for _step in range(6):
            words = torch.randint(4, 52, (4, 32))
            loss = model(input_ids=words, labels=words).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return t
