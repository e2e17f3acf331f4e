"""A claim of a document, and the parts of a verdict about it. Nothing here measures anything.

A file of `pytracer.lab.claims.subjects` writes a claim down in three steps, from top to bottom:

    L3 = Statement("L3", sources=("S3",), quote="torch.no_grad() in validation saves memory")

    @experiment("validation")
    def validation(lab: Lab) -> dict[str, Any]:
        ...  # returns figures

    @L3.judged_by("CONFIRMED if ...; else REFUTED", experiments=("validation",), without_gpu=EXACT)
    def no_grad_saves_activations(measured: Measured) -> Verdict:
        ...  # reads them: measured["validation"]["no_grad_activations"]

A judge is a pure function from measurements to a verdict. It follows the rule that stands above it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CONFIRMED, REFUTED, DEPENDS, SKIPPED, FAILED = (
    "CONFIRMED",
    "REFUTED",
    "DEPENDS",
    "SKIPPED",
    "FAILED",
)
VERDICTS = (CONFIRMED, REFUTED, DEPENDS, SKIPPED, FAILED)

# The documents, as claims cite them.
SOURCES = {
    "S0": "Model training anatomy (Hugging Face)",
    "S1": "Efficient training on a single GPU (Hugging Face, v4.25.1)",
    "S2": "DNN model anatomy (notes)",
    "S3": "Efficient GPU utilization (notes)",
    "S4": "Adafactor on two GPUs (notebook)",
}

MOST_UNKNOWN = 0.001  # the share of a peak that a trace may leave unknown

# What a run without a GPU shows, where several claims share the answer.
EXACT = "The same as on a GPU: these are bytes and values, not times."
CPU_TIMES = "FLOPs and bytes are the same as on a GPU; times are this CPU's."

Figures = Mapping[str, Any]  # of one experiment
Measured = Mapping[str, Figures]  # by the experiment's name


@dataclass(frozen=True)
class Verdict:
    """A judge's answer: the numbers in one line, and the reason where the answer needs one."""

    verdict: str
    measured: str
    because: str = ""  # for DEPENDS: the setting, moment or machine that decides


Judge = Callable[[Measured], Verdict]


@dataclass(frozen=True)
class Claim:
    """A statement, the experiments that measure it, and the judge of their figures."""

    id: str
    sources: tuple[str, ...]
    quote: str
    arithmetic: str  # the documents' own numbers, where they say more than the text
    rule: str
    judge: Judge
    experiments: tuple[str, ...]
    welcome: tuple[str, ...] = ()  # the judge reads these experiments if they were run
    without_gpu: str = ""  # what a run on a CPU shows, and what it cannot show


_CLAIMS_OF_MODULE: dict[str, list[Claim]] = {}


def claims_of(module: str) -> tuple[Claim, ...]:
    """The claims that a module registered, from its top to its bottom."""
    return tuple(_CLAIMS_OF_MODULE.get(module, ()))


@dataclass(frozen=True)
class Statement:
    """A sentence of the documents. `judged_by` makes it a claim."""

    id: str
    sources: tuple[str, ...]
    quote: str
    arithmetic: str = ""

    def judged_by(
        self,
        rule: str,
        *,
        experiments: tuple[str, ...],
        without_gpu: str,
        welcome: tuple[str, ...] = (),
    ) -> Callable[[Judge], Judge]:
        """Registers the claim with the decorated function as its judge."""

        def register(judge: Judge) -> Judge:
            claim = Claim(
                self.id,
                self.sources,
                self.quote,
                self.arithmetic,
                rule,
                judge,
                experiments,
                welcome,
                without_gpu,
            )
            _CLAIMS_OF_MODULE.setdefault(judge.__module__, []).append(claim)
            return judge

        return register


def on_gpu(figures: Figures) -> bool:
    """Whether the figures come from a GPU."""
    return bool(figures["device"] != "cpu")


def full_size(figures: Figures) -> bool:
    """Whether the experiment had the documents' own sizes, not the scaled-down ones."""
    return bool(figures["scale"] == "full")


def confirmed_if(condition: bool, measured: str, because: str = "") -> Verdict:
    """CONFIRMED or REFUTED."""
    return Verdict(CONFIRMED if condition else REFUTED, measured, because)


def near(value: float, expected: float, share: float = 0.01) -> bool:
    """Whether a value is within this share of the expected one."""
    return abs(value - expected) <= share * expected


def ranged(figures: Figures, name: str, form: str = ".2f") -> str:
    """A median, with its interval if there were several samples: 2.02 (1.96 to 2.11)."""
    middle, low, high = figures[name], figures.get(f"{name}_low"), figures.get(f"{name}_high")
    if low is None or high is None or low == high:
        return f"{middle:{form}}"
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def mib(amount: float) -> str:
    """Bytes in MiB. The documents write sizes so, but call the unit MB."""
    return (
        f"{amount / 2**20:,.0f} MiB" if abs(amount) >= 10 * 2**20 else f"{amount / 2**20:.2f} MiB"
    )


def change(now: float, before: float) -> str:
    """The relative change, as a percentage with a sign: -42.0%."""
    return f"{now / before - 1:+.1%}" if before else "from nothing"
