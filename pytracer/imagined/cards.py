"""The cards that can be imagined: the driver's figures for each, and their sources."""

from dataclasses import dataclass, replace

from pytracer import errors
from pytracer.imagined import calibration

GIB = 1 << 30


@dataclass(frozen=True)
class Card:
    """A model of card. Sizes are bytes."""

    name: str
    title: str  # the driver's name for it
    capability: tuple[int, int]
    capacity: int  # the total that cudaMemGetInfo reports
    processors: int
    source: str  # of the capacity
    beside: int | None = None  # bytes of context, kernels and libraries; None: not measured
    workspace: int | None = None  # of cuBLAS, where it was measured

    @property
    def cublas_workspace(self) -> int:
        """The workspace of cuBLAS per thread and stream, as torch's CublasHandlePool.cpp sets it."""
        if self.workspace is not None:
            return self.workspace
        return 32 << 20 if self.capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) << 10

    @property
    def threads_per_processor(self) -> int:
        """The most threads that a multiprocessor runs at once."""
        if self.capability == (7, 5):
            return 1024
        return 1536 if self.capability in ((8, 6), (8, 7), (8, 9), (12, 0)) else 2048

    @property
    def has_bfloat16(self) -> bool:
        """Whether its tensor cores multiply bfloat16."""
        return self.capability >= (8, 0)


def _gib(amount: float) -> int:
    return round(amount * GIB)


_REPORT = "a report of torch's out-of-memory message: "

CARDS = (
    Card(
        "H200",
        "NVIDIA H200",
        (9, 0),
        _gib(139.80),
        132,
        "measured with torch 2.11.0+cu130, driver 580.159",
        beside=744 << 20,
    ),
    Card(
        "H100",
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        _gib(79.10),
        132,
        "many reports of torch's out-of-memory message",
    ),
    Card(
        "A100-80GB",
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        _gib(79.25),
        108,
        _REPORT + "https://github.com/levihsu/OOTDiffusion/issues/235",
    ),
    Card(
        "A100-40GB",
        "NVIDIA A100-SXM4-40GB",
        (8, 0),
        _gib(39.50),
        108,
        _REPORT + "https://github.com/TianheWu/CoSeR/issues/10",
    ),
    Card(
        "A10",
        "NVIDIA A10",
        (8, 6),
        _gib(21.99),
        72,
        _REPORT + "https://github.com/zai-org/CogVLM/issues/236",
    ),
    Card(
        "L40",
        "NVIDIA L40",
        (8, 9),
        _gib(44.40),
        142,
        _REPORT + "https://github.com/NVlabs/Eagle/issues/68",
    ),
    Card(
        "RTX4090",
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        _gib(23.64),
        128,
        _REPORT + "https://github.com/3DTopia/Phidias-Diffusion/issues/8",
    ),
    Card(
        "RTX3090",
        "NVIDIA GeForce RTX 3090",
        (8, 6),
        _gib(23.69),
        82,
        _REPORT + "https://github.com/ucwxb/GraphAvatar/issues/4",
    ),
    Card(
        "V100-32GB",
        "Tesla V100-SXM2-32GB",
        (7, 0),
        _gib(31.75),
        80,
        _REPORT + "https://github.com/hiyouga/LlamaFactory/issues/182",
    ),
    Card(
        "T4",
        "Tesla T4",
        (7, 5),
        _gib(14.56),
        40,
        _REPORT + "https://github.com/Zheng-Chong/CatVTON/issues/133",
    ),
)

_SHORT = {"A100": "A100-80GB", "V100": "V100-32GB"}


def known() -> list[Card]:
    """The table's cards and those that were measured on this machine, with what was measured."""
    kept = calibration.kept()
    cards = [_as_measured(card, kept.pop(card.title, None)) for card in CARDS]
    for one in kept.values():
        card = Card(
            _short(one.title), one.title, one.capability, one.capacity, one.processors, one.source
        )
        cards.append(_as_measured(card, one))
    return cards


def _as_measured(card: Card, one: calibration.Measured | None) -> Card:
    if one is None:
        return card
    return replace(
        card,
        capacity=one.capacity,
        source=one.source,
        beside=one.beside,
        workspace=one.cublas_workspace or None,
    )


def _short(title: str) -> str:
    return title.removeprefix("NVIDIA ").removeprefix("GeForce ").replace(" ", "-")


def find(name: str, capacity: int | None = None) -> Card:
    """The card of this name, in any spelling, with `capacity` if that is given.

    Raises:
        errors.UsageError: there is no such card in the table.
    """
    wanted = _plain(name)
    cards = known()
    names = {_plain(card.name): card for card in cards}
    names |= {_plain(card.title): card for card in cards}
    names |= {_plain(short): names[_plain(full)] for short, full in _SHORT.items()}
    card = names.get(wanted)
    if card is None:
        listed = ", ".join(card.name for card in cards)
        raise errors.UsageError(
            f"no card is called {name!r}; there are {listed}. For another card, name one of the "
            'same architecture and the size: imagine("RTX4090", capacity="16GiB")'
        )
    if capacity is None:
        return card
    return replace(card, capacity=capacity, source="as it was asked for")


def _plain(name: str) -> str:
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    for word in ("nvidia", "geforce"):
        plain = plain.removeprefix(word)
    return plain
