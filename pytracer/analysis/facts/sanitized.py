"""Tables in which every number points somewhere.

A file that was cut or damaged may have lost rows that others point to. Such a number becomes 0,
which is "none" in every table; the file's report says that something is missing.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer import meta
from pytracer.recorded import Trace, once_per_trace
from pytracer.schema import CATEGORIES, CATEGORY, Labels, Stacks

_OF_PARAMETERS = (CATEGORY["weights"], CATEGORY["gradients"])


@once_per_trace
def labels(trace: Trace) -> Labels:
    """The label table; row 0 is there."""
    found, texts = _with_first_row(trace.labels), len(trace.strings)
    return _renamed(
        trace,
        Labels(
            category=within(found.category, len(CATEGORIES)),
            role=within(found.role, texts),
            name=within(found.name, texts),
            shape=within(found.shape, texts),
            dtype=within(found.dtype, texts),
        ),
    )


def _renamed(trace: Trace, found: Labels) -> Labels:
    """Parameters that an optimizer had before a module was met: by the module's name after all."""
    renamed = meta.of(trace).renamed
    if not renamed or not trace.strings:
        return found
    row_of = {text: row for row, text in enumerate(trace.strings)}
    name_of = np.arange(len(trace.strings), dtype=found.name.dtype)
    for by_group, by_module in renamed.items():
        if by_group in row_of:
            name_of[row_of[by_group]] = row_of.get(by_module, row_of[by_group])
    name = name_of[found.name]
    # An optimizer's own are taken for masters where there are 16-bit weights; these are not its own.
    not_masters = (name != found.name) & np.isin(found.category, _OF_PARAMETERS)
    role = np.where(not_masters, row_of.get("parameter", found.role), found.role)
    return found._replace(name=name, role=role.astype(found.role.dtype))


@once_per_trace
def stacks(trace: Trace) -> Stacks:
    """The stack table; row 0 is there, and callers come before those they called."""
    found, texts = _with_first_row(trace.stacks), len(trace.strings)
    rows = np.arange(len(found.parent), dtype=np.uint32)
    return Stacks(
        parent=within(found.parent, rows),
        file=within(found.file, texts),
        function=within(found.function, texts),
        line=found.line,
    )


def within(numbers: NDArray[Any], end: int | NDArray[Any]) -> NDArray[Any]:
    """The numbers, and 0 for those that are not below the end."""
    return np.where(numbers < end, numbers, 0).astype(numbers.dtype, copy=False)


def _with_first_row(table: Any) -> Any:
    if len(table[0]):
        return table
    return type(table)(*(np.zeros(1, column.dtype) for column in table))
