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
    library: str = ""  # the file of transformers, if the line is in one
    inside: str = ""  # the class there

    def text(self) -> str:
        before = source(self.program)
        assert before.count(self.old) == 1, (self.program, self.old, before.count(self.old))
        return before.replace(self.old, self.new)

    def line(self) -> str:
        """The line to be named, as tables spell it."""
        text, file = self.text(), f"{self.program}.py"
        if self.library:
            import transformers

            file = f"transformers/{self.library}.py"
            text = (Path(transformers.__file__).parents[1] / file).read_text()
        lines = list(enumerate(text.splitlines(), 1))
        first = next((at for at, line in lines if f"class {self.inside}(" in line), 1)
        return f"{file}:{next(at for at, line in lines if at >= first and self.found in line)}"


_BACKWARD = "    loss.backward()\n"
_KEPT = "    loss.backward()\n    losses.append({0})\n"
_GPT2 = ("self.lm_head(", "models/gpt2/modeling_gpt2", "GPT2LMHeadModel")
_BERT = ("self.LayerNorm(hidden_states", "models/bert/modeling_bert", "BertOutput")
_SDPA = ("torch.nn.functional.scaled_dot_product_attention(", "integrations/sdpa_attention")

# fmt: off
REGRESSIONS = [
    Regression(*each) for each in [
        ("mlp", "a wider layer", "WIDTH = 512", "WIDTH = 2048", "self.down(self.up(x)"),
        ("mlp", "an optimizer with state", "SGD(", "AdamW(", "optimizer.step()"),
        ("mlp", "an input kept", _BACKWARD, _KEPT.format("x"), "x = torch.randn(ROWS"),
        ("gpt2", "a cast forgotten", "enabled=True", "enabled=False", *_GPT2),
        ("gpt2", "logits kept", _BACKWARD, _KEPT.format("given.logits"), *_GPT2),
        ("gpt2", "a longer text", "LENGTH = 128", "LENGTH = 256", *_GPT2),
        ("bert", "an average of the weights", "# the loop\n",
         "import copy\n\naverage = copy.deepcopy(model)\n# the loop\n", "copy.deepcopy(model)"),
        ("bert", "no fused optimizer", "fused=True", "foreach=True", "optimizer.step()"),
        ("bert", "hidden states kept", "labels=labels)",
         "labels=labels, output_hidden_states=True)\n    hidden.append(out.hidden_states)", *_BERT),
        ("llama", "checkpointing lost", "model.gradient_checkpointing_enable", "str",
         "self.down_proj(self.act_fn", "models/llama/modeling_llama"),
        ("llama", "weights of 32 bits", "torch.bfloat16", "torch.float32", *_SDPA),
        ("llama", "a longer text", "(8, 256)", "(8, 512)",
         "nn.functional.cross_entropy(", "loss/loss_utils"),
        ("convolutions", "a second norm", "self.norm(self.first(x))",
         "self.norm(self.norm(self.first(x)))", "return self.activate("),
        ("convolutions", "larger images", "SIZE = 64", "SIZE = 96", "return self.activate("),
        ("convolutions", "a graph kept", _BACKWARD,
         "    loss.backward(retain_graph=True)\n    losses.append(loss)\n", "return self.activate("),
        ("unet", "more channels", "CHANNELS = 32", "CHANNELS = 64", "functional.silu(self.second"),
        ("unet", "noise in double precision", "noise = torch.randn_like(x)",
         "noise = torch.randn_like(x, dtype=torch.float64).float()", "torch.randn_like(x, dtype"),
        ("unet", "a second loss", "(model(x + noise), noise)",
         "(model(x + noise), noise) + model(x).square().mean()", "functional.silu(self.second"),
        ("lstm", "two layers more", "LAYERS = 2", "LAYERS = 4", "self.cells(self.words"),
        ("lstm", "logits copied", "    given, state = model(ids[:, :-1], state)\n",
         "    given, state = model(ids[:, :-1], state)\n    seen = torch.cat([given, given])\n",
         "seen = torch.cat"),
        ("lstm", "gradients of zeros", "set_to_none=True", "set_to_none=False", "self.cells(self.words"),
        ("vae", "images logged", _BACKWARD, _KEPT.format("images"), "torch.sigmoid(self.decoder"),
        ("vae", "a larger hidden layer", "HIDDEN = 512", "HIDDEN = 1536", "torch.sigmoid(self.decoder"),
        ("vae", "a second copy of the data", 'data = torch.randn(COUNT, PIXELS, device="cuda")\n',
         'data = torch.randn(COUNT, PIXELS, device="cuda")\nnormal = data - data.mean()\n',
         "normal = data"),
        ("gan", "a graph of the generator more", "fake.detach()", "fake", "self.body(noise)"),
        ("gan", "another optimizer", "RMSprop(critic", "Adam(critic", "of_critic.step()"),
        ("gan", "a larger batch", "ROWS = 256", "ROWS = 512", "self.body(noise)"),
        ("policy", "no_grad forgotten", "with torch.no_grad():", "if True:", "values.append(value(states"),
        ("policy", "longer episodes", "STEPS = 16", "STEPS = 32", "loss = (value(seen)"),
        ("policy", "advantages kept", _BACKWARD,
         "    loss.backward()\n    losses.append(torch.cat(every))\n", "torch.cat(every))"),
    ]
]
# fmt: on


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
    starts = sorted(
        {node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)}
    )
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
    return text.replace(
        "    loss.backward()\n", "    loss.backward()\n    print('loss', loss.item())\n"
    )


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
    return text.replace(
        "    loss.backward()\n",
        "    begun = time.time()\n    loss.backward()\n    took = time.time() - begun\n",
    )


def _asserted(text: str, rng: random.Random) -> str:
    """The loss's shape is checked."""
    return text.replace(
        "    loss.backward()\n", "    assert loss.dim() == 0\n    loss.backward()\n"
    )


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
