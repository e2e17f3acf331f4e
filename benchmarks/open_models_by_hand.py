"""What one rank must hold of a model's weights, gradients and AdamW's state, from shapes alone.

Nothing here runs a step or asks pytracer. The model is made on the meta device; the rest is
arithmetic over the shapes of its parameters.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_STEP = 4  # bytes: fused AdamW counts its steps for each parameter, as float32
# The dimension that each style of transformers' plans cuts, of a matrix and of a vector.
_CUTS: dict[str, tuple[int, int | None]] = {
    "colwise": (-2, 0),
    "colwise_rep": (-2, 0),
    "colwise_gather_output": (-2, 0),
    "packed_colwise": (-2, 0),
    "rowwise": (-1, None),
    "rowwise_rep": (-1, None),
    "rowwise_split_input": (-1, None),
    "packed_rowwise": (-1, None),
    "embedding_rowwise": (0, None),
    "embedding_colwise": (1, None),
}


class _Share(NamedTuple):
    """Numbers of a parameter that a rank holds: with padding, and without; and of its gradient."""

    padded: int
    own: int
    gradient: int


def on_meta(config: Mapping[str, Any]) -> Any:
    """Returns the model of a config.json, without memory."""
    import torch
    import transformers

    read = dict(config)
    kind = transformers.CONFIG_MAPPING[read["model_type"]]
    with torch.device("meta"):
        return getattr(transformers, read["architectures"][0])(kind.from_dict(read))


def parameters(model: Any) -> int:
    """Counts the numbers in all parameters; tied ones count once."""
    return sum(one.numel() for one in model.parameters())


def held(
    model: Any, order: Mapping[str, Any], ranks: int, rank: int, idle: str = ""
) -> dict[str, int]:
    """Returns the bytes that a rank holds as its optimizer steps.

    Args:
        model: on the meta device.
        order: how it is trained: its `shard` and its `dtype`.
        ranks: how many ranks there are.
        rank: which of them it is.
        idle: a pattern for names of parameters that the loss does not depend on.
    """
    item = 2 if order.get("dtype") == "bfloat16" else 4
    weights = gradients = state = 0
    for name, one in model.named_parameters():
        share = _share(model, name, tuple(one.shape), order.get("shard"), ranks, rank)
        weights += item * share.padded
        if one.requires_grad and re.fullmatch(idle, name) is None:
            gradients += item * share.gradient
            state += 2 * item * share.own + _STEP
    weights += sum(_of_buffer(one, item) for one in model.buffers())
    return {"weights": weights, "gradients": gradients, "optimizer_state": state}


def _of_buffer(buffer: Any, item: int) -> int:
    """Bytes of a buffer: real numbers take the weights' dtype, whole ones keep their own."""
    each = item if buffer.is_floating_point() else buffer.element_size()
    return int(buffer.numel() * each)


def _share(
    model: Any, name: str, shape: tuple[int, ...], shard: str | None, ranks: int, rank: int
) -> _Share:
    """What a rank holds of one parameter."""
    whole = math.prod(shape)
    if shard == "fsdp2":
        return _cut(shape, 0, ranks, rank)
    if shard != "tp":
        return _Share(whole, whole, whole)
    style = _style(model.tp_plan, name)
    matrix, vector = _CUTS.get(style, (None, None))
    dimension = vector if len(shape) == 1 else matrix
    if dimension is None:
        return _Share(whole, whole, whole)
    own = _cut(shape, dimension, ranks, rank).own
    # Each rank has the gradient of all rows of an embedding, unless a head adds one of its own rows.
    return _Share(
        own, own, whole if style == "embedding_rowwise" and not _tied(model, name) else own
    )


def _tied(model: Any, name: str) -> bool:
    """Whether the weight is the head's, too."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_parameter(name)


def _cut(shape: tuple[int, ...], dimension: int, ranks: int, rank: int) -> _Share:
    """One piece of a dimension that is cut into pieces of equal length; the last may be shorter."""
    length = shape[dimension]
    piece = math.ceil(length / ranks)
    rest = math.prod(shape) // length
    own = min(max(length - rank * piece, 0), piece)
    return _Share(piece * rest, own * rest, piece * rest)


def _style(plan: Mapping[str, str], name: str) -> str:
    """How the plan treats a parameter: by its own name, or by that of its module."""
    general = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
    module = general.rpartition(".")[0]
    return plan.get(general) or plan.get(module) or "replicate"
