"""What the ranks that do not run may do otherwise than the one that does.

One rank runs, and the others are taken to do the same. So each of these is looked for:

- It leaves out parameters in backward. If another rank uses them, DistributedDataParallel gives this one
  their gradients. It runs twice, without and with them, and what it takes is an interval.
- The last rank gives other values to a collective, and the program decides by the result.
- The last rank runs other operators. Then more ranks run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytracer.analysis.forecasts.fits import requested_peak, reserved_peak
from pytracer.data.recorded import Trace

_DECIDES = (
    "{line} decides by what all ranks say, and rank {last} says something else than rank {first}: each "
    "is imagined as if all said the same. State the outcome, or skip it while imagining"
)
_OTHERS = (
    "ranks {ranks} run different programs, and those between them were not imagined: name the ranks that "
    "differ, with --rank"
)
_STAGES = ("pp", "pipe", "pipeline", "stage")  # dimensions of a mesh whose ranks differ
_FEW = 8


def classes(ranks: int, meshes: Sequence[Mapping[str, Any]], talks: bool) -> list[int]:
    """One rank of each class of equal ranks: of each stage, if the program is a pipeline."""
    for mesh in meshes:
        shape, names = mesh["shape"], mesh["names"] or []
        for at, name in enumerate(names):
            if name in _STAGES and math.prod(shape) == ranks:
                return [stage * math.prod(shape[at + 1 :]) for stage in range(shape[at])]
    if not talks:
        return [0]
    return several(ranks)


def several(ranks: int) -> list[int]:
    """All ranks, or some of many, where each may run another program."""
    return list(range(ranks)) if ranks <= _FEW else [0, 1, ranks // 2, ranks - 1]


def left_out(trace: Trace) -> list[str]:
    """The lines whose backward leaves out parameters that another rank may use."""
    return [one["left_out"] for one in _of(trace)["doubts"] if one.get("left_out")]


def between(least: Trace, most: Trace) -> Trace:
    """The run without gradients that only other ranks make. The most it takes is that with them."""
    both = (least, most)
    bounds = {
        "reserved_at_least": min(_ends(both, "reserved_at_least", reserved_peak)),
        **{name: max(_ends(both, name, sure)) for name, sure in _BOUNDS.items()},
    }
    rest = [one for each in both for one in _of(each)["doubts"] if not one.get("left_out")]
    return _with(least, {**bounds, "left_out": left_out(least), "doubts": rest})


def doubting(trace: Trace, reason: str) -> Trace:
    """The same run, which doubts itself for one more reason."""
    doubts = [*_of(trace)["doubts"], {"bytes": 0, "says": reason}]
    return _with(trace, {"doubts": doubts})


def disagree(first: Trace, last: Trace) -> str:
    """Why neither of two ranks may be right that decide by values of both; "" if they agree."""
    one, other = _of(first), _of(last)
    lines = [*one["relies"], *other["relies"]]
    if not lines or one["values"] == other["values"]:
        return ""
    return _DECIDES.format(line=lines[0], first=one["rank"], last=other["rank"])


def are_alike(first: Trace, last: Trace) -> bool:
    """Whether two ranks run the same operators in the same order."""
    return bool(_of(first)["program"] == _of(last)["program"])


def stands_for(first: Trace, last: Trace) -> bool:
    """Whether the last rank runs the same, takes no more memory, and says the same."""
    most = (_ends((first, last), name, sure) for name, sure in _BOUNDS.items())
    no_more = all(there <= here for here, there in most)
    return are_alike(first, last) and no_more and not disagree(first, last)


def of_some(traces: Sequence[Trace]) -> str:
    """Why some ranks of many do not stand for all; "" if they do.

    The first rank often does more than the others, which are then alike.
    """
    ranks = [_of(one)["rank"] for one in traces]
    programs = {_of(one)["program"] for one in traces[1:]}
    if len(ranks) == _of(traces[0])["ranks"] or len(programs) <= 1:
        return ""
    return _OTHERS.format(ranks=", ".join(map(str, ranks)))


def _of(trace: Trace) -> dict[str, Any]:
    found: dict[str, Any] = trace.meta["imagined"]
    return found


def _with(trace: Trace, fields: dict[str, Any]) -> Trace:
    return replace(trace, meta={**trace.meta, "imagined": {**_of(trace), **fields}})


def _ends(traces: Sequence[Trace], name: str, sure: Callable[[Trace], int]) -> list[int]:
    """One end of each run's interval; where it has none, what is sure."""
    return [_of(one).get(name) or sure(one) for one in traces]


_BOUNDS = {"peak_at_most": requested_peak, "reserved_at_most": reserved_peak}
