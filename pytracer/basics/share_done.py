"""How much of a long work is done. The work tells it, and a line on the terminal shows it."""

_done: list[float] = [0.0]


def tell(share: float) -> None:
    """Says that this share of the work is done, from 0 to 1. At 0 nobody knows."""
    _done[0] = share


def told() -> float:
    """The share that was told last."""
    return _done[0]
