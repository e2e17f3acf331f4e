"""Tables in which every number points to a row that exists.

A cut or damaged file may lack rows to which others point. Such a number becomes 0, which means
"none" in every table. The file's health report then names the loss.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.data import meta
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import CATEGORIES, CATEGORY, Labels, Stacks

_OF_PARAMETERS = (CATEGORY["weights"], CATEGORY["gradients"])


@once_per_trace
def labels(trace: Trace) -> Labels:
    """The label table; row 0 always exists."""
    table, texts = _with_first_row(trace.labels), len(trace.strings)
    return _renamed(
        trace,
        Labels(
            category=within(table.category, len(CATEGORIES)),
            role=within(table.role, texts),
            name=within(table.name, texts),
            shape=within(table.shape, texts),
            dtype=within(table.dtype, texts),
        ),
    )


def _renamed(trace: Trace, table: Labels) -> Labels:
    """Gives parameters their module's name if the capture met their optimizer first."""
    renamed = meta.of(trace).renamed
    if not renamed or not trace.strings:
        return table
    row_of = {text: row for row, text in enumerate(trace.strings)}
    name_of = np.arange(len(trace.strings), dtype=table.name.dtype)
    for by_group, by_module in renamed.items():
        if by_group in row_of:
            name_of[row_of[by_group]] = row_of.get(by_module, row_of[by_group])
    name = name_of[table.name]
    # Beside 16-bit weights, an optimizer's own parameters count as masters. These are a module's.
    not_masters = (name != table.name) & np.isin(table.category, _OF_PARAMETERS)
    role = np.where(not_masters, row_of.get("parameter", table.role), table.role)
    return table._replace(name=name, role=role.astype(table.role.dtype))


@once_per_trace
def stacks(trace: Trace) -> Stacks:
    """The stack table; row 0 always exists, and callers come before the functions they called."""
    table, texts = _with_first_row(trace.stacks), len(trace.strings)
    rows = np.arange(len(table.parent), dtype=np.uint32)
    return Stacks(
        parent=within(table.parent, rows),
        file=within(table.file, texts),
        function=within(table.function, texts),
        line=table.line,
    )


def within(numbers: NDArray[Any], end: int | NDArray[Any]) -> NDArray[Any]:
    """The numbers, with 0 in place of each that is not below the end; the same array if all are."""
    exists = numbers < end
    return numbers if exists.all() else np.where(exists, numbers, 0).astype(numbers.dtype)


def _with_first_row(table: Any) -> Any:
    if len(table[0]):
        return table
    return type(table)(*(np.zeros(1, column.dtype) for column in table))
