"""One spelling of module paths, for every table, page and file.

If a program has several models, the model's class comes first: `Critic.body`. A recording spells the
first model's paths as `named_modules()` does, because nobody knows then that a second model will run.
Whoever reads the recording knows. A child of a Sequential that is the model has only a number as its
path, which is written `[0]`.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytracer.data import schema

_WITH_PARAMETERS_NAME = tuple(
    schema.CATEGORY[name] for name in ("weights", "gradients", "optimizer_state")
)
_BARE = re.compile(r"(\d+)(?=\.|$)")
_SPELLED_BARE = re.compile(r"\[(\d+|\*)\]")
_NO_MODULE = ("param_groups[", "optimizers[")  # parameters that no module has


class Roots(NamedTuple):
    """The outermost modules of a program, by name: a class, with a number if it is not alone."""

    models: tuple[str, ...] = ()  # those with parameters
    others: frozenset[str] = frozenset()  # a loss, an activation
    plain: str = ""  # the first of all: paths in it were recorded without its class

    @property
    def several(self) -> bool:
        """Whether paths need their model's class. A loss beside a model does not count."""
        return len(self.models) > 1 or (self.models != () and self.plain not in self.models)

    def split(self, path: str) -> tuple[str, str]:
        """The model and the path inside it. The model is "" if the path does not have it."""
        model, _, inside = path.partition(".")
        return (model, inside) if self.several and self.has(model) else ("", path)

    def whole(self, path: str, model: str = "") -> str:
        """The path, with a class if there are several models: of this one, or of the first."""
        if not self.several or not path or self.has(path.partition(".")[0]):
            return path
        return f"{model or self.plain}.{in_code(path)}"

    def shown(self, path: str) -> str:
        """A recorded module's path as it is shown. A name in parentheses is no path."""
        return path if path.startswith("(") else module_text(_named(self, path))

    def has(self, name: str) -> bool:
        """Whether an outermost module has this name."""
        return name in self.models or name in self.others


def roots_of(document: Mapping[str, Any]) -> Roots:
    """The outermost modules that a trace's document lists."""
    listed = document.get("roots")
    known = listed if isinstance(listed, dict) else {}
    models = tuple(name for name, has_parameters in known.items() if has_parameters is True)
    return Roots(models, frozenset(known) - {*models}, next(iter(known), ""))


def module_text(path: str) -> str:
    """A module's path as it is shown, from its path in code: [0] for 0."""
    return _BARE.sub(r"[\1]", path, count=1) if _BARE.match(path) else path


def in_code(path: str) -> str:
    """A module's path as `get_submodule` wants it: 0 for [0]."""
    return _SPELLED_BARE.sub(r"\1", path, count=1) if path.startswith("[") else path


def spelled(
    roots: Roots, strings: tuple[str, ...], scopes: schema.Scopes, labels: schema.Labels
) -> tuple[tuple[str, ...], schema.Scopes, schema.Labels]:
    """The tables with the paths as they are shown. Each text is looked at once.

    A parameter of the only model keeps the name that `named_parameters()` gives it: `0.weight`.
    """
    texts, row_of = list(strings), {text: row for row, text in enumerate(strings)}

    def replaced(rows: NDArray[Any], which: NDArray[np.bool_], shown: list[str]) -> NDArray[Any]:
        differs = np.array([new != old for new, old in zip(shown, strings, strict=True)], np.bool_)
        here = which & (rows < len(differs))
        here[here] = differs[rows[here]]
        if not here.any():
            return rows
        new = np.arange(len(differs), dtype=rows.dtype)
        for row in np.flatnonzero(np.bincount(rows[here])).tolist():
            new[row] = row_of.setdefault(shown[row], len(texts))
            texts.extend([shown[row]] if new[row] == len(texts) else ())
        result = rows.copy()
        result[here] = new[rows[here]]
        result.flags.writeable = False
        return result

    modules = scopes.kind == schema.SCOPE_KIND["module"]
    scopes = scopes._replace(name=replaced(scopes.name, modules, list(map(roots.shown, strings))))
    if roots.several:
        names = [_named(roots, text) for text in strings]
        named = np.isin(labels.category, _WITH_PARAMETERS_NAME)
        named |= labels.role == row_of.get("attribute", len(strings))
        labels = labels._replace(name=replaced(labels.name, named, names))
    return tuple(texts), scopes, labels


def _named(roots: Roots, text: str) -> str:
    return text if text.startswith(_NO_MODULE) else roots.whole(text)


def spelled_document(roots: Roots, document: Mapping[str, Any]) -> dict[str, Any]:
    """The trace's document with the names of parameters as they are shown."""
    shown = dict(document)
    if not roots.several:
        return shown
    if isinstance(renamed := shown.get("renamed"), dict):
        shown["renamed"] = {
            key: _named(roots, name) if isinstance(name, str) else name
            for key, name in renamed.items()
        }
    sharding = shown.get("sharding")
    if isinstance(sharding, dict) and isinstance(parameters := sharding.get("parameters"), list):
        shown["sharding"] = {
            **sharding,
            "parameters": [_parameter(roots, row) for row in parameters],
        }
    return shown


def _parameter(roots: Roots, row: Any) -> Any:
    has_name = isinstance(row, dict) and isinstance(row.get("name"), str)
    return {**row, "name": _named(roots, row["name"])} if has_name else row
