"""Allocations grouped by a key: the key's value for each, and who holds how many bytes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer import errors
from pytracer.analysis.facts import owners, scopes
from pytracer.analysis.facts.allocations import Allocations, allocations, as_of
from pytracer.analysis.facts.casts import elements
from pytracer.analysis.facts.devices import pool_text
from pytracer.analysis.facts.usage import sums
from pytracer.data import frames, meta, sanitized
from pytracer.data.model_names import module_text
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import CATEGORIES, CATEGORY, I64, KEYS, PHASES, ROLE, ROLES, U8, U32, Mask

_MOST_NUMBERS = 2**63  # of a column of 64 bits
_PART = 1 << 16


def dtype_rows(trace: Trace) -> NDArray[Any]:
    """Per allocation, its dtype's row of the string table, 0 if unknown.

    A cast has the label of its weight, so the type of the cast itself is unknown.
    """
    alloc = allocations(trace)
    cast = alloc.role == ROLE["autocast_copy"]
    return np.where(cast, 0, sanitized.labels(trace).dtype[alloc.label])


def role_text(trace: Trace, role: int) -> str:
    """The text of a role's number."""
    return ROLES[role] if role < len(ROLES) else trace.strings[role - len(ROLES)]


@dataclass(frozen=True)
class Group:
    """Texts as codes: row i is `names[codes[i]]`; -1 means unknown."""

    codes: I64
    names: list[str]

    def categorical(self) -> Any:
        """A column of a table; -1 becomes NA."""
        return frames.categorical(self.codes, self.names)


class Texts:
    """Turns columns of numbers into texts; an empty text means unknown."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def of(self, numbers: NDArray[Any], text: Callable[[int], str]) -> Group:
        """Any numbers, by a function from a number to its text."""
        return grouped(numbers, text)

    def strings(self, rows: NDArray[Any]) -> Group:
        """Rows of the string table."""
        return self.of(rows, lambda row: self._trace.strings[row])

    def strings_as(self, rows: NDArray[Any], known: Mapping[str, str]) -> Group:
        """Rows of the string table by what is known of them; the others are unknown."""
        return self.of(rows, lambda row: known.get(self._trace.strings[row], ""))

    def lines(self, rows: NDArray[Any]) -> Group:
        """Rows of the stack table, as `file:line`."""
        return self.of(rows, lambda row: owners.line_text(self._trace, row))

    def phases(self, numbers: U8) -> Group:
        """Numbers of phases."""
        return self.of(numbers, lambda phase: PHASES[phase] if phase < len(PHASES) else "")

    def roles(self, numbers: NDArray[Any]) -> Group:
        """Numbers of roles."""
        return self.of(numbers, lambda role: role_text(self._trace, role))

    def pools(self, places: NDArray[Any]) -> Group:
        """Places, as their private pools."""
        return self.of(places, lambda place: pool_text(self._trace, place))


@dataclass(frozen=True)
class Holder:
    """The bytes and the number of allocations under one name."""

    name: str
    bytes: int
    allocations: int


def holders(trace: Trace, key: str, which: Mask, at: int | None = None) -> list[Holder]:
    """Like `by` with one key, for any allocations; largest first, without the unknown."""
    groups = group(trace, key, which, at)
    named = groups.codes >= 0
    size = allocations(trace).requested_bytes[which][named]
    totals = sums(groups.codes[named], size, len(groups.names))
    counts = np.bincount(groups.codes[named], minlength=len(groups.names))
    rows = [Holder(n, int(t), int(c)) for n, t, c in zip(groups.names, totals, counts, strict=True)]
    return sorted(rows, key=lambda row: -row.bytes)


def grouped(numbers: NDArray[Any], text: Callable[[int], str]) -> Group:
    """Numbers as texts. Calls `text` once per distinct number."""
    distinct, codes = np.unique(numbers, return_inverse=True)
    texts = [text(int(number)) for number in distinct]
    names = sorted(set(texts) - {""})
    place = {name: code for code, name in enumerate(names)} | {"": -1}
    to_code = np.array([place[name] for name in texts], np.int64)
    return Group(to_code[codes], names)


def group(trace: Trace, key: str, which: Mask | NDArray[np.intp], at: int | None = None) -> Group:
    """The key's value of each of these allocations, at that event or when they end."""
    alloc, texts = as_of(trace, at), Texts(trace)
    if key == "module":
        return texts.of(*_holding_modules(trace, alloc, which))
    if key == "op":
        return texts.strings(alloc.cause("op")[which])
    if key == "line":
        return texts.lines(alloc.cause("line")[which])
    if key in ("phase", "free_phase"):
        return texts.phases(getattr(alloc, key)[which])
    if key == "category":
        return texts.of(alloc.category[which], lambda number: CATEGORIES[number])
    if key == "role":
        return texts.roles(alloc.role[which])
    if key == "dtype":
        return texts.strings(dtype_rows(trace)[which])
    if key in ("name", "shape"):
        return texts.strings(getattr(sanitized.labels(trace), key)[alloc.label[which]])
    if key == "step":
        return texts.of(alloc.step[which], lambda step: "" if step < 0 else str(step))
    if key == "mesh_dim":
        return texts.strings_as(sanitized.labels(trace).name[alloc.label[which]], _cuts(trace))
    if key == "pool":
        return texts.pools(alloc.place[which])
    listed = errors.did_you_mean(key, KEYS) or f"; there is: {', '.join(KEYS)}"
    raise errors.UsageError(f"cannot group by {key!r}{listed}")


def together(groups: Sequence[Group]) -> tuple[I64, U32]:
    """The distinct rows of the groups' codes, in order, and for each allocation its row of them."""
    row, firsts = alike([group.codes + 1 for group in groups])
    return np.column_stack([group.codes[firsts] for group in groups]), row


def alike(columns: Sequence[NDArray[Any]]) -> tuple[U32, NDArray[np.intp]]:
    """Gives rows that are equal in all columns one number. Also returns each number's first row.

    Columns must not have negative numbers.
    """
    number, most = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        values = int(column.max(initial=0)) + 1
        if most * values >= _MOST_NUMBERS:
            distinct, number = np.unique(number, return_inverse=True)
            most = len(distinct)
        if most * values >= _MOST_NUMBERS:
            distinct, column = np.unique(column, return_inverse=True)
            values = len(distinct)
        number *= values
        np.add(number, column, out=number, casting="unsafe", dtype=np.int64)
        most *= values
    return _numbered(number)


def _numbered(values: I64) -> tuple[U32, NDArray[np.intp]]:
    """Like np.unique with both of its options, but faster and smaller if most values are equal."""
    begins = range(0, len(values), _PART)
    distinct = np.unique(
        np.concatenate([values[:0], *(np.unique(values[b : b + _PART]) for b in begins)])
    )
    number, firsts = np.zeros(len(values), np.uint32), np.zeros(len(distinct), np.intp)
    for begin in reversed(begins):
        part = number[begin : begin + _PART]
        part[:] = np.searchsorted(distinct, values[begin : begin + _PART])
        # Backwards, so that the first row of each number is the one that stays.
        firsts[part[::-1]] = np.arange(begin, begin + len(part))[::-1]
    return number, firsts


def _cuts(trace: Trace) -> dict[str, str]:
    """By a parameter's name, the dimensions of the mesh that cut it: "shard", "shard x tensor"."""
    return {one.name: one.over or "none" for one in meta.of(trace).sharding.parameters}


def _holding_modules(
    trace: Trace, alloc: Allocations, which: Mask | NDArray[np.intp]
) -> tuple[NDArray[Any], Callable[[int], str]]:
    """A number per allocation, and the module path that the number stands for."""
    module = alloc.cause("module")[which]
    name = sanitized.labels(trace).name[alloc.label[which]].astype(np.int64)
    kept = np.isin(
        alloc.category[which],
        [CATEGORY[c] for c in ("weights", "gradients", "optimizer_state")],
    )
    kept &= ~_of_all_parameters(trace)[alloc.label[which]]
    count = len(trace.strings)
    root = _first_root(trace)
    # Numbers from `count` on: the module that the tensor of this name belongs to.
    numbers = np.where(kept & (name != 0), name + count, module)

    def path(number: int) -> str:
        if number < count:
            return trace.strings[number]
        return module_text(trace.strings[number - count]).rpartition(".")[0] or root

    return numbers, path


@once_per_trace
def _of_all_parameters(trace: Trace) -> Mask:
    """Labels of a state that is larger than its parameter: an optimizer's, for all of them at once."""
    labels, strings = sanitized.labels(trace), trace.strings
    size = dict[int, int]()  # by the parameter's name
    for row in np.flatnonzero(labels.category == CATEGORY["weights"]).tolist():
        name = int(labels.name[row])
        size[name] = max(size.get(name, 0), elements(strings[labels.shape[row]]))
    result = np.zeros(len(labels.name), np.bool_)
    for row in np.flatnonzero(labels.category == CATEGORY["optimizer_state"]).tolist():
        own = size.get(int(labels.name[row]), 0)
        result[row] = 0 < own < elements(strings[labels.shape[row]])
    return result


def _first_root(trace: Trace) -> str:
    """The first model's name; the names of its own tensors have no path."""
    tree = scopes.tree(trace)
    roots = np.flatnonzero((tree.kind == scopes.MODULE) & (tree.module[tree.parent] == 0))
    names = (trace.strings[row] for row in tree.name[roots])
    return next((name for name in names if "." not in name), "")
