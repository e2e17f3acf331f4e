"""Small training programs with mistakes to plant and harmless edits, for `pytracer check`.

Each program is a file beside this one. A regression replaces a text of it, and the line of its
`found` is where the bytes are made. Harmless edits are functions of any program.
"""

import ast
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))
MOST_HARMLESS = 6  # of each program


def source(name: str) -> str:
    return (HERE / f"{name}.py").read_text()


class Regression(NamedTuple):
    """An edit of a program, by which it needs at least 1 MiB more."""

    program: str
    title: str
    old: str
    new: str
    found: str  # a text of the line that is to be named, after the edit
    module: str = ""  # of transformers, if the line is there: bert, or bert.BertOutput for one class

    def text(self) -> str:
        before = source(self.program)
        assert before.count(self.old) == 1, (self.program, self.old, before.count(self.old))
        return before.replace(self.old, self.new)

    def line(self) -> str:
        """The line to be named, as tables spell it."""
        text, file = self.text(), f"{self.program}.py"
        name, _, inside = self.module.partition(".")
        if name:
            import transformers

            file = f"transformers/models/{name}/modeling_{name}.py"
            text = (Path(transformers.__file__).parents[1] / file).read_text()
        lines = list(enumerate(text.splitlines(), 1))
        first = next(at for at, line in lines if f"class {inside}" in line) if inside else 1
        return f"{file}:{next(at for at, line in lines if at >= first and self.found in line)}"


_BACKWARD = "    loss.backward()\n"
_KEPT = "    loss.backward()\n    losses.append({0})\n"

REGRESSIONS = [
    Regression("mlp", "a wider layer", "WIDTH = 512", "WIDTH = 2048", "self.down(self.up(x)"),
    Regression("mlp", "an optimizer with state", "SGD(", "AdamW(", "optimizer.step()"),
    Regression(
        "mlp", "an input kept", _BACKWARD, _KEPT.format("x"), "x = torch.randn(ROWS"
    ),
    Regression("gpt2", "a cast forgotten", "enabled=True", "enabled=False", "model(input_ids=ids"),
    Regression("gpt2", "logits kept", _BACKWARD, _KEPT.format("given.logits"), "model(input_ids=ids"),
    Regression("gpt2", "a longer text", "LENGTH = 128", "LENGTH = 256", "model(input_ids=ids"),
    Regression(
        "bert", "an average of the weights", "step = 0\n",
        "step = 0\nimport copy\n\naverage = copy.deepcopy(model)\n", "copy.deepcopy(model)",
    ),
    Regression("bert", "no fused optimizer", "fused=True", "foreach=True", "optimizer.step()"),
    Regression(
        "bert", "hidden states asked for", "labels=labels)",
        "labels=labels, output_hidden_states=True)\n    hidden.append(out.hidden_states)",
        "self.LayerNorm(hidden_states", "bert.BertOutput",
    ),
    Regression("llama", "checkpointing lost", "model.gradient_checkpointing_enable", "str", "loss = model("),
    Regression("llama", "weights of 32 bits", "torch.bfloat16", "torch.float32", "loss = model("),
    Regression(
        "llama", "a cache returned", "use_cache=False", "use_cache=True", "loss = model("
    ),
    Regression(
        "convolutions", "another activation", "nn.ReLU(inplace=True)", "nn.SiLU()", "return self.activate("
    ),
    Regression("convolutions", "larger images", "SIZE = 64", "SIZE = 96", "return self.activate("),
    Regression(
        "convolutions", "a graph kept", _BACKWARD,
        "    loss.backward(retain_graph=True)\n    losses.append(loss)\n", "return self.activate(",
    ),
    Regression("unet", "more channels", "CHANNELS = 32", "CHANNELS = 64", "functional.silu(self.first"),
    Regression(
        "unet", "noise in double precision", "noise = torch.randn_like(x)",
        "noise = torch.randn_like(x, dtype=torch.float64).float()",
        "torch.randn_like(x, dtype",
    ),
    Regression(
        "unet", "skips copied", "skips.append(x)", "skips.append(x.clone())", "x.clone()"
    ),
    Regression("lstm", "two layers more", "LAYERS = 2", "LAYERS = 4", "self.cells(self.words"),
    Regression(
        "lstm", "states not detached", "state = tuple(each.detach() for each in state)",
        "pass", "self.cells(self.words",
    ),
    Regression("lstm", "no in-place gradients", "set_to_none=True", "set_to_none=False", "loss.backward()"),
    Regression(
        "vae", "images logged", _BACKWARD, _KEPT.format("images"), "torch.sigmoid(self.decoder"
    ),
    Regression("vae", "a larger hidden layer", "HIDDEN = 512", "HIDDEN = 1536", "self.encoder(x)"),
    Regression(
        "vae", "a second copy of the data", "data = torch.randn(COUNT, PIXELS, device=\"cuda\")",
        "data = torch.randn(COUNT, PIXELS, device=\"cuda\")\nnormal = data - data.mean()",
        "normal = data",
    ),
    Regression(
        "gan", "the generator's graph in the other step", "fake.detach()", "fake",
        "score_of_fake = critic(",
    ),
    Regression("gan", "another optimizer", "RMSprop(critic", "Adam(critic", "of_critic.step()"),
    Regression("gan", "a larger batch", "ROWS = 256", "ROWS = 512", "self.body(noise)"),
    Regression(
        "policy", "no_grad forgotten", "with torch.no_grad():", "if True:", "values.append(value(states"
    ),
    Regression(
        "policy", "longer episodes", "STEPS = 16", "STEPS = 32", "states = advance("
    ),
    Regression(
        "policy", "advantages kept", "    loss.backward()\n",
        "    loss.backward()\n    losses.append(torch.cat(every))\n", "torch.cat(every))",
    ),
]


# ---------------------------------------------------------------- harmless edits


class Harmless(NamedTuple):
    """An edit of a program that changes no byte."""

    program: str
    title: str
    edit: Callable[[str, random.Random], str]
    seed: int

    def text(self) -> str:
        return self.edit(source(self.program), random.Random(self.seed))


def _comments(text: str, rng: random.Random) -> str:
    """Comment lines at some places, by which all later lines move."""
    lines = text.splitlines()
    starts = sorted({node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)})
    for at in sorted(rng.sample(starts, 4), reverse=True):
        line = lines[at - 1]
        indent = line[: len(line) - len(line.lstrip())]
        if not line.lstrip().startswith(("else", "elif", "@")):
            lines.insert(at - 1, f"{indent}# note {rng.randrange(99)}")
    return "\n".join(lines) + "\n"


def _renamed(text: str, rng: random.Random) -> str:
    """A local variable or a module's attribute with another name."""
    tree = ast.parse(text)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)
             and isinstance(node.ctx, ast.Store)}  # fmt: skip
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
              and isinstance(node.ctx, ast.Store)}  # fmt: skip
    calls = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    name = rng.choice(sorted(one for one in names - calls if len(one) > 3))
    return re.sub(rf"\b{name}\b", f"{name}_{rng.choice('abc')}", text)


def _logged(text: str, rng: random.Random) -> str:
    """Numbers are printed after each step."""
    return text.replace("    loss.backward()\n", "    loss.backward()\n    print('loss', loss.item())\n")


def _formatted(text: str, rng: random.Random) -> str:
    """Python's own layout, without comments."""
    return ast.unparse(ast.parse(text)) + "\n"


def _in_main(text: str, rng: random.Random) -> str:
    """The loop is a function, and its variables are local."""
    head, mark, loop = text.partition("# the loop\n")
    body = "".join(f"    {line}\n" if line else "\n" for line in loop.splitlines())
    return f"{head}{mark}def main():\n{body}\n\nif __name__ == '__main__':\n    main()\n"


def _moved_below(text: str, rng: random.Random) -> str:
    """Constants that are not used, and a longer docstring."""
    first, _, rest = text.partition("\n")
    return f'{first[:-3]}\n\nIt has {rng.randrange(100)} notes.\n"""\nVERSION = "1.2"\n{rest}'


def _annotated(text: str, rng: random.Random) -> str:
    """Functions say that they return anything."""
    return re.sub(r"(def \w+\([^)]*\)):", r"\1 -> object:", text)


def _measured(text: str, rng: random.Random) -> str:
    """Time is measured and steps are counted."""
    text = text.replace("import torch\n", "import time\n\nimport torch\n", 1)
    return text.replace("    loss.backward()\n", "    begun = time.time()\n    loss.backward()\n    took = time.time() - begun\n")


def _asserted(text: str, rng: random.Random) -> str:
    """The loss's shape is checked."""
    return text.replace("    loss.backward()\n", "    assert loss.dim() == 0\n    loss.backward()\n")


def _helped(text: str, rng: random.Random) -> str:
    """The backward pass is a function of its own."""
    helper = "def go_back(loss):\n    loss.backward()\n\n\n# the loop\n"
    text = text.replace("    loss.backward()\n", "    go_back(loss)\n")
    return text.replace("# the loop\n", helper, 1)


EDITS = (_comments, _renamed, _logged, _formatted, _in_main, _moved_below, _annotated, _measured,
         _asserted, _helped)  # fmt: skip


def harmless() -> Iterator[Harmless]:
    """Six edits of each program, drawn by its name."""
    for name in NAMES:
        rng, text = random.Random(name), source(name)
        fitting = [edit for edit in EDITS if edit(text, random.Random(0)) != text]
        for edit in rng.sample(fitting, MOST_HARMLESS):
            yield Harmless(name, edit.__name__.strip("_"), edit, rng.randrange(10**6))
