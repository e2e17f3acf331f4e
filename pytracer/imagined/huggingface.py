"""A training step of a Hugging Face model from its configuration alone: no script, no weights."""

import importlib
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytracer import errors

OPTIMIZERS = ("adamw", "adamw-loop", "adamw8bit", "adafactor", "sgd")
SHARDS = ("fsdp2", "ddp", "tp")
DTYPES = ("float32", "bfloat16", "float16")
# The chance to leave a layer out of a step. A step with all layers takes the most.
_SKIPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
_LONGEST = 2048  # words, where nobody says how many
_LABELS = 64  # words or letters of a label


@dataclass(frozen=True)
class Order:
    """What to train, and how."""

    folder: str
    batch: int = 1
    length: int | None = None  # of the sequence; None: the model's, at most 2048
    optimizer: str = "adamw"
    bf16: bool = False  # mixed precision
    dtype: str = "float32"  # of the weights
    checkpoint: bool = False
    lora: int | None = None  # its rank
    shard: str | None = None  # one of SHARDS


def train(order: Order, steps: int) -> None:
    """Trains the model on the GPU, for this many steps of the optimizer.

    Raises:
        errors.UsageError: there is no such model, or it takes inputs of an unknown kind.
    """
    import torch

    config, make = _model_of(order.folder)
    given = _inputs(config, make, order)
    if order.shard is not None:
        torch.distributed.init_process_group("nccl")
    model = _split(make, config) if order.shard == "tp" else make(config)
    model.to(getattr(torch, order.dtype)).train()
    if order.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if order.lora is not None:
        model = _with_lora(model, order.lora)
    run = _placed(model, order)
    updates = _optimizer(order.optimizer, model)
    mixed = order.bf16 and order.shard != "fsdp2"  # FSDP2 casts by itself
    for _ in range(steps):
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
            loss = run(**{name: make_one() for name, make_one in given.items()}).loss
        loss.backward()
        del loss
        updates.step()
        updates.zero_grad()


def _model_of(folder: str) -> tuple[Any, Callable[[Any], Any]]:
    transformers = _package("transformers", "--hf")
    if not (Path(folder) / "config.json").is_file():
        raise errors.UsageError(f"--hf {folder}: there is no config.json in this folder")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as problem:
        first = str(problem).strip().partition("\n")[0]
        raise errors.UsageError(f"--hf {folder}: transformers cannot read it: {first}") from None
    names = config.architectures or [""]
    kind = getattr(transformers, names[0], None)
    if kind is None:
        auto = transformers.AutoModelForCausalLM
        if type(config) not in auto._model_mapping:
            named = f"its class {names[0]}" if names[0] else "the class of its model"
            raise errors.UsageError(
                f"--hf {folder}: {named} is not in transformers {transformers.__version__}"
            )
        kind = auto._model_mapping[type(config)]
    for part in (config, getattr(config, "text_config", config)):
        if getattr(part, "use_cache", False):
            part.use_cache = False
        for name in _SKIPS:
            if getattr(part, name, 0):
                setattr(part, name, 0.0)
    return config, kind


def _package(name: str, option: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise errors.UsageError(f"{option} needs {package}: pip install {package}") from None


# ---------------------------------------------------------------- what it trains on


def _inputs(config: Any, kind: Any, order: Order) -> dict[str, Callable[[], Any]]:
    """A function for each input, which makes a batch of it."""
    import torch

    batch, name = order.batch, kind.main_input_name
    takes = inspect.signature(kind.forward).parameters
    if "labels" not in takes and "return_loss" not in takes:
        raise errors.UsageError(
            f"--hf: {kind.__name__} has no loss, because it takes no labels: name a class for "
            'training in "architectures" of config.json, such as LlamaForCausalLM'
        )
    text = getattr(config, "text_config", None) or config

    def whole(bound: int, *shape: int) -> Callable[[], Any]:
        return lambda: torch.randint(bound, shape, device="cuda")

    def real(*shape: int) -> Callable[[], Any]:
        dtype = getattr(torch, order.dtype)  # as the weights, which take no other
        return lambda: torch.randn(*shape, device="cuda", dtype=dtype)

    def images(of: Any) -> Callable[[], Any]:
        size = getattr(of, "image_size", 224)
        high, wide = size if isinstance(size, list | tuple) else (size, size)
        return real(batch, getattr(of, "num_channels", 3), high, wide)

    if "labels" not in takes:  # pairs of a text and an image
        length = min(order.length or _LONGEST, text.max_position_embeddings)
        return {
            "input_ids": whole(text.vocab_size, batch, length),
            "pixel_values": images(config.vision_config),
            "return_loss": lambda: True,
        }
    if name == "input_ids":
        length = order.length or min(getattr(text, "max_position_embeddings", _LONGEST), _LONGEST)
        ids = whole(text.vocab_size, batch, length)
        return {"input_ids": ids, "labels": _labels(kind, config, whole, batch, length) or ids}
    if name == "pixel_values":
        return {
            name: images(config),
            "labels": whole(max(config.num_labels, 1), batch),
        }
    if name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)
        return {
            name: real(batch, config.num_mel_bins, frames),
            "labels": whole(config.vocab_size, batch, order.length or _LABELS),
        }
    if name == "input_values":
        return {
            name: real(batch, order.length or 16000),
            "labels": whole(getattr(config, "vocab_size", 2), batch, _LABELS),
        }
    raise errors.UsageError(
        f"--hf: {kind.__name__} takes {name}, whose shape is not in its configuration: imagine a "
        "script that makes it"
    )


def _labels(kind: Any, config: Any, whole: Any, batch: int, length: int) -> Any:
    """The labels of a model of words that are not words themselves."""
    name = kind.__name__
    if name.endswith("ForSequenceClassification"):
        return whole(max(config.num_labels, 1), batch)
    if name.endswith("ForTokenClassification"):
        return whole(max(config.num_labels, 1), batch, length)
    return None


# ---------------------------------------------------------------- how it trains


def _with_lora(model: Any, rank: int) -> Any:
    peft = _package("peft", "--lora")
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear"))


def _placed(model: Any, order: Order) -> Any:
    """Puts the model onto the card, or this rank's share of it."""
    import torch

    if order.shard == "fsdp2":
        return _sharded(model, order)
    model.to("cuda")
    if order.shard == "ddp":
        # As Trainer: a parameter that a step does not need is no error. Checkpoints do not allow it.
        return torch.nn.parallel.DistributedDataParallel(
            model, device_ids=[0], find_unused_parameters=not order.checkpoint
        )
    return model


def _split(make: Callable[[Any], Any], config: Any) -> Any:
    """Makes the model, and splits its layers over all ranks by the plan that transformers has."""
    import torch

    distributed = _package("transformers.distributed", "--shard tp")
    starts = _package("transformers.initialization", "--shard tp")
    ranks = torch.distributed.get_world_size()
    with starts.no_tie_weights():  # two parts of a model may want one weight split differently
        model = make(config)
    name, kind = type(model).__name__, type(model)
    if not hasattr(kind, "maybe_distribute_model"):
        raise errors.UsageError("--shard tp needs transformers 5.20 or later")
    if not model.tp_plan:
        raise errors.UsageError(
            f"--shard tp:{ranks}: transformers has no plan of tensor parallelism for {name}: "
            "choose fsdp2 or ddp, or imagine a script that splits it"
        )
    wish, _, mesh = kind.prepare_distribute_model(distributed.DistributedConfig(tp_size=ranks))
    model = kind.maybe_distribute_model(model, wish, mesh)
    model.tie_weights()
    return model


def _sharded(model: Any, order: Order) -> Any:
    """Shards each layer, as the model's class names them, and then the rest.

    The whole model is on the host before: each layer's share goes to the card alone. Layers inside
    of layers come first, as fully_shard asks. A layer with a weight that another module has too
    (tied embeddings) is left to the rest, because one group must hold both.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {}
    if order.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    names, holders = set(getattr(model, "_no_split_modules", None) or ()), _holders(model)
    layers = [each for each in model.modules() if type(each).__name__ in names]
    alone = [each for each in layers if _holders(each).items() <= holders.items()]
    for layer in reversed(alone):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _holders(model: Any) -> Counter[int]:
    """How many of its modules hold each parameter, by the parameter's identity."""
    own = (each.parameters(recurse=False) for each in model.modules())
    return Counter(id(one) for parameters in own for one in parameters)


def _optimizer(name: str, model: Any) -> Any:
    import torch

    trained = _groups([one for one in model.parameters() if one.requires_grad])
    if name == "adamw8bit":
        torchao = _package("torchao.optim", "--optimizer adamw8bit")
        return torchao.AdamW8bit(trained, lr=1e-4)
    makers: dict[str, Callable[[Any], Any]] = {
        "adamw": lambda given: torch.optim.AdamW(given, lr=1e-4, fused=True),
        "adamw-loop": lambda given: torch.optim.AdamW(given, lr=1e-4, foreach=False),
        "adafactor": lambda given: torch.optim.Adafactor(given, lr=1e-3),
        "sgd": lambda given: torch.optim.SGD(given, lr=1e-2, momentum=0.9),
    }
    return makers[name](trained)


def _groups(trained: list[Any]) -> list[Any]:
    """Parameters for an optimizer: split ones apart, because no call may have both kinds."""
    kinds: dict[bool, list[Any]] = {True: [], False: []}
    for one in trained:
        kinds[hasattr(one, "placements")].append(one)
    return [{"params": each} for each in kinds.values()] if all(kinds.values()) else trained
