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
_REPORTS = "many reports of torch's out-of-memory message"
_PROPERTIES = "public reports of torch.cuda.get_device_properties"


def _in_mib(
    name: str,
    title: str,
    capability: tuple[int, int],
    mebibytes: int,
    processors: int,
    source: str = _PROPERTIES,
) -> Card:
    return Card(name, title, capability, mebibytes << 20, processors, source)


# The numbers of multiprocessors are those of NVIDIA's data sheets (CUDA cores / 128; of A100, A30,
# H100 and V100 / 64) and of the reports. A source that begins with "estimated" is no measurement.
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
        _REPORTS,
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
    _in_mib("B200", "NVIDIA B200", (10, 0), 182_631, 148),
    _in_mib("GB200", "NVIDIA GB200", (10, 0), 188_733, 152, _REPORTS),
    # Announced with 192 GB; no report of one was found, so all its figures are those of a B200.
    _in_mib("B100", "NVIDIA B100", (10, 0), 182_631, 148, "estimated: the figures of a B200"),
    _in_mib(
        "GH200", "NVIDIA GH200 480GB", (9, 0), 97_285, 132, "estimated: as an H20 of equal size"
    ),
    _in_mib("H100-NVL", "NVIDIA H100 NVL", (9, 0), 95_324, 132, _REPORTS),
    _in_mib("H100-PCIe", "NVIDIA H100 PCIe", (9, 0), 81_008, 114),
    _in_mib("H20", "NVIDIA H20", (9, 0), 97_285, 78),
    _in_mib("RTX-PRO-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 97_249, 188),
    _in_mib("RTX5090", "NVIDIA GeForce RTX 5090", (12, 0), 32_112, 170, _REPORTS),
    _in_mib("RTX5080", "NVIDIA GeForce RTX 5080", (12, 0), 15_841, 84, _REPORTS),
    _in_mib(
        "RTX5070Ti", "NVIDIA GeForce RTX 5070 Ti", (12, 0), 15_841, 70, "estimated: as an RTX 5080"
    ),
    _in_mib("RTX4080", "NVIDIA GeForce RTX 4080", (8, 9), 16_049, 76),
    _in_mib("L4", "NVIDIA L4", (8, 9), 22_559, 58, _REPORTS),
    _in_mib("L40S", "NVIDIA L40S", (8, 9), 45_466, 142, _REPORTS),
    _in_mib("RTX6000-Ada", "NVIDIA RTX 6000 Ada Generation", (8, 9), 48_622, 142),
    _in_mib("A6000", "NVIDIA RTX A6000", (8, 6), 48_538, 84, _REPORTS),
    _in_mib("A5000", "NVIDIA RTX A5000", (8, 6), 24_114, 64),
    _in_mib("A40", "NVIDIA A40", (8, 6), 45_416, 84),
    _in_mib("RTX3080", "NVIDIA GeForce RTX 3080", (8, 6), 9_900, 68, "estimated: 10 GiB less 3 %"),
    _in_mib("RTX3060", "NVIDIA GeForce RTX 3060", (8, 6), 11_931, 28),
    _in_mib("RTX2080Ti", "NVIDIA GeForce RTX 2080 Ti", (7, 5), 11_019, 68),
    _in_mib("V100-16GB", "Tesla V100-SXM2-16GB", (7, 0), 16_130, 80),
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
