"""How an answer shows itself. Exporters make the texts, so the answer is handed the functions."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Shown(NamedTuple):
    """The functions that show an answer."""

    text: Callable[[Any], str]  # for print()
    html: Callable[[Any], str]  # for a notebook
