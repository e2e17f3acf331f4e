"""The linear layers of well-known models, and of a model described by its sizes."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pytracer import errors
from pytracer.lab.gemm import shapes
from pytracer.lab.gemm.shapes import DTYPES, ROLES, Gemm


@dataclass(frozen=True)
class Layer:
    """A linear layer, `out x inner`. Both are a size's name and a factor.

    A model has `count` of them. `loss` means that its outputs are classes for a cross-entropy.
    """

    name: str
    out: tuple[str, int]
    inner: tuple[str, int]
    count: int = 1
    loss: bool = False


@dataclass(frozen=True)
class Model:
    """Sizes by name, and the layers made of them. `batch` and `seq` are sizes too."""

    name: str
    sizes: dict[str, int]
    layers: tuple[Layer, ...]
    dtype: str = "bf16"
    tied: bool = True  # the last layer's weight is the embedding's
    roles: tuple[str, ...] = ROLES  # of the products that a step runs; training runs all
    parameter_bytes: int = 4  # float32 under autocast
    gradient_bytes: int = 4  # per parameter
    optimizer_bytes: int = 8  # per parameter: Adam's two moments in float32
    step_seconds: float | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def rows(self) -> int:
        """The number of tokens, which are the rows of every layer's input."""
        return self.sizes["batch"] * self.sizes["seq"]

    def size(self, which: tuple[str, int]) -> int:
        """The size of a layer's dimension."""
        name, times = which
        return self.sizes[name] * times

    def with_size(self, name: str, value: int) -> "Model":
        """The same model with one size changed."""
        return replace(self, sizes={**self.sizes, name: value})

    def products(self, layer: Layer) -> dict[str, Gemm]:
        """The products of a layer in a step, by role."""
        out, inner = self.size(layer.out), self.size(layer.inner)
        three = shapes.linear(self.rows, out, inner, self.dtype)
        return {role: three[role] for role in self.roles}

    def uses(self, layer: Layer, name: str) -> bool:
        """Whether a size is part of this layer's products."""
        return name in (layer.out[0], layer.inner[0], "batch", "seq")

    @property
    def parameters(self) -> int:
        """The parameters of the linear layers, and of an embedding that is not tied to one."""
        weights = sum(
            layer.count * self.size(layer.out) * self.size(layer.inner) for layer in self.layers
        )
        if not self.tied:
            weights += sum(
                self.size(layer.out) * self.size(layer.inner) for layer in self.layers if layer.loss
            )
        return weights

    @property
    def output_bytes(self) -> int:
        """The bytes that the layers return in one forward, and of the loss's float32 copy."""
        itemsize = DTYPES[self.dtype].out_bytes
        return sum(
            layer.count * self.rows * self.size(layer.out) * (itemsize + (4 if layer.loss else 0))
            for layer in self.layers
        )


def _gpt2(layers: int) -> tuple[Layer, ...]:
    return (
        Layer("qkv", ("hidden", 3), ("hidden", 1), layers),
        Layer("attention out", ("hidden", 1), ("hidden", 1), layers),
        Layer("mlp up", ("ffn", 1), ("hidden", 1), layers),
        Layer("mlp down", ("hidden", 1), ("ffn", 1), layers),
        Layer("head", ("vocab", 1), ("hidden", 1), loss=True),
    )


def _bert(layers: int) -> tuple[Layer, ...]:
    return (
        Layer("query, key, value", ("hidden", 1), ("hidden", 1), 3 * layers),
        Layer("attention out", ("hidden", 1), ("hidden", 1), layers),
        Layer("mlp up", ("ffn", 1), ("hidden", 1), layers),
        Layer("mlp down", ("hidden", 1), ("ffn", 1), layers),
        Layer("head transform", ("hidden", 1), ("hidden", 1)),
        Layer("head", ("vocab", 1), ("hidden", 1), loss=True),
    )


def _llama(layers: int) -> tuple[Layer, ...]:
    return (
        Layer("query", ("hidden", 1), ("hidden", 1), layers),
        Layer("key, value", ("kv", 1), ("hidden", 1), 2 * layers),
        Layer("attention out", ("hidden", 1), ("hidden", 1), layers),
        Layer("gate, up", ("ffn", 1), ("hidden", 1), 2 * layers),
        Layer("down", ("hidden", 1), ("ffn", 1), layers),
        Layer("head", ("vocab", 1), ("hidden", 1), loss=True),
    )


def _sizes(vocab: int, hidden: int, ffn: int, batch: int, seq: int, **more: int) -> dict[str, int]:
    return {"vocab": vocab, "hidden": hidden, "ffn": ffn, "batch": batch, "seq": seq, **more}


MODELS = {
    model.name: model
    for model in (
        Model("gpt2", _sizes(50257, 768, 3072, 8, 1024), _gpt2(12)),
        Model("gpt2-medium", _sizes(50257, 1024, 4096, 8, 1024), _gpt2(24)),
        Model("gpt2-large", _sizes(50257, 1280, 5120, 4, 1024), _gpt2(36)),
        Model("gpt2-xl", _sizes(50257, 1600, 6400, 4, 1024), _gpt2(48)),
        Model("bert-base", _sizes(30522, 768, 3072, 32, 512), _bert(12)),
        Model("bert-large", _sizes(30522, 1024, 4096, 16, 512), _bert(24)),
        Model("llama-2-7b", _sizes(32000, 4096, 11008, 1, 4096, kv=4096), _llama(32), tied=False),
        Model("llama-3-8b", _sizes(128256, 4096, 14336, 1, 8192, kv=1024), _llama(32), tied=False),
    )
}


def described(name: str | None, dtype: str, given: dict[str, int | None]) -> Model:
    """A known model with some sizes changed, or a GPT with the given sizes.

    Raises:
        errors.UsageError: the model is unknown, a size is below 1, or sizes are missing.
    """
    sizes = {key: value for key, value in given.items() if value is not None and key != "layers"}
    for key, value in given.items():
        if value is not None and value < 1:
            raise errors.UsageError(f"--{key} is {value}: it must be at least 1")
    if name is not None:
        if name not in MODELS:
            raise errors.UsageError(f"no model {name!r}; there are {', '.join(MODELS)}")
        preset = MODELS[name]
        unknown = sizes.keys() - preset.sizes.keys()
        if unknown:
            raise errors.UsageError(f"{name} has no --{' --'.join(sorted(unknown))}")
        layers = preset.layers
        if given.get("layers"):
            raise errors.UsageError("--layers belongs to a model that is described by its sizes")
        if "hidden" in sizes and "ffn" not in sizes:
            factor = preset.sizes["ffn"] / preset.sizes["hidden"]
            sizes["ffn"] = round(sizes["hidden"] * factor)
        return replace(preset, sizes={**preset.sizes, **sizes}, layers=layers, dtype=dtype)
    missing = [key for key in ("vocab", "hidden", "batch", "seq") if key not in sizes]
    if missing:
        raise errors.UsageError(
            f"--{' --'.join(missing)} missing: a model is described by --vocab --hidden --batch "
            f"--seq, or by --model ({', '.join(MODELS)}), or by a trace"
        )
    sizes.setdefault("ffn", 4 * sizes["hidden"])
    depth = given.get("layers") or 12
    notes = () if given.get("layers") else ("12 layers were assumed: --layers says how many",)
    return Model("described", sizes, _gpt2(depth), dtype, notes=notes)


class TracedLayer(Protocol):
    """A linear layer of a trace."""

    name: str
    out: int
    inner: int
    count: int
    loss: bool


class TracedLayers(Protocol):
    """The linear layers of a trace, and the sizes of their inputs."""

    layers: Iterable[TracedLayer]
    batch: int
    seq: int
    itemsize: int
    parameter_itemsize: int
    gradient_bytes: int
    state_bytes: int
    trained: bool
    step_seconds: float | None
    device: str


def traced(layers_of_trace: Any, dtype: str | None, device: str) -> Model:
    """The model of a trace.

    Equal sizes count as one size, so padding one pads all. A trace has the width of elements but
    not their dtype; without `dtype` they count as bf16 or fp32.

    Raises:
        errors.UsageError: the dtype is unknown.
    """
    shown: TracedLayers = layers_of_trace
    chosen = dtype or {2: "bf16", 4: "fp32"}.get(shown.itemsize, "bf16")
    if chosen not in DTYPES:
        raise errors.UsageError(f"--dtype {chosen!r}: there are {', '.join(DTYPES)}")
    notes = []
    if dtype is None:
        notes.append(f"the trace shows {shown.itemsize}-byte elements; {chosen} was measured")
    elif DTYPES[chosen].bytes != shown.itemsize:
        notes.append(f"the trace shows {shown.itemsize}-byte elements, not {chosen}")
    step_seconds = shown.step_seconds
    if shown.device.partition(":")[0] != device:
        notes.append(f"traced on {shown.device}, and measured here on {device}")
        step_seconds = None
    if not shown.trained:
        notes.append("the trace has no backward, so only forward products were measured")
    sizes = {"batch": shown.batch, "seq": shown.seq}
    layers = []
    for one in shown.layers:
        sizes |= {str(one.out): one.out, str(one.inner): one.inner}
        loss = one.loss and shown.trained  # it is timed with its backward
        layers.append(Layer(one.name, (str(one.out), 1), (str(one.inner), 1), one.count, loss))
    return Model(
        "traced",
        sizes,
        tuple(layers),
        chosen,
        roles=ROLES if shown.trained else ROLES[:1],
        parameter_bytes=shown.parameter_itemsize,
        gradient_bytes=shown.gradient_bytes,
        optimizer_bytes=shown.state_bytes,
        step_seconds=step_seconds,
        notes=tuple(notes),
    )
