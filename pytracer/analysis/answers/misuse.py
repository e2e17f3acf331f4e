"""Mistakes in how a program is traced or trains, as its trace shows them, counted by name.

`pytracer.health` has the meaning of each name, and the advice.
"""

import numpy as np
from numpy.typing import NDArray

from pytracer import meta
from pytracer.analysis.facts import phases, sanitized, scopes
from pytracer.analysis.facts.scopes import BACKWARD, MODULE, OPTIMIZER, Mask
from pytracer.recorded import Trace
from pytracer.schema import ACTION, CATEGORY, DEVICE_TYPES, SCOPE_GRAD, U32

_OF_AN_OPTIMIZER = "param_groups["  # how the capture names parameters that are in no module


def counts(trace: Trace) -> dict[str, int]:
    """How often the program made each mistake."""
    threads = phases.training_threads(trace)
    return {
        "training_threads": threads if threads > 1 else 0,
        "weights_elsewhere": _weights_elsewhere(trace),
        "foreign_parameters": _foreign_parameters(trace),
        "steps_without_backward": _steps_without_backward(trace),
    }


def _weights_elsewhere(trace: Trace) -> int:
    """Weights that lie on a device whose memory is not recorded."""
    recorded = meta.of(trace).options.devices
    if not recorded:
        return 0
    events, (positions, _) = trace.events, _weight_labels(trace)
    place = sanitized.within(events.place[positions], len(trace.places.device_type))
    kind = trace.places.device_type[place]
    missing = [i for i, name in enumerate(DEVICE_TYPES) if name not in recorded]
    return len(np.unique(events.address[positions[np.isin(kind, missing)]]))


def _weight_labels(trace: Trace) -> tuple[NDArray[np.intp], U32]:
    """Positions of the events that label weights, and their rows of the label table."""
    events, labels = trace.events, sanitized.labels(trace)
    positions = np.flatnonzero(events.action == ACTION["label"])
    row = sanitized.within(events.bytes[positions], len(labels.category)).astype(np.uint32)
    are_weights = labels.category[row] == CATEGORY["weights"]
    return positions[are_weights], row[are_weights]


def _foreign_parameters(trace: Trace) -> int:
    """Parameters of an optimizer that are in no module, although modules have parameters."""
    labels, strings = sanitized.labels(trace), trace.strings
    names = {
        strings[labels.name[row]]
        for row in np.unique(_weight_labels(trace)[1])
        if strings[labels.role[row]] == "parameter"
    }
    foreign = sum(_OF_AN_OPTIMIZER in name for name in names)
    return foreign if foreign < len(names) else 0


def _steps_without_backward(trace: Trace) -> int:
    """Optimizer steps with a forward but no backward since the previous step.

    A forward without grad mode does not count, since it needs no backward: an evaluation between
    two optimizers' steps, or gradients that were estimated without one.
    """
    tree = scopes.tree(trace)
    modules = tree.kind == MODULE
    tells = phases.tells_of_grad_mode(trace)
    if tells is not None:
        with_grad = tree.module[tells & (tree.flags & SCOPE_GRAD != 0)]
        modules &= np.isin(np.arange(len(modules)), with_grad)
    own = tree.thread == phases.main_thread(trace)
    steps = np.sort(tree.begin[own & (tree.kind == OPTIMIZER)])

    def since_last_step(which: Mask) -> NDArray[np.intp]:
        before = np.searchsorted(np.sort(tree.begin[which]), steps)
        return np.diff(before, prepend=0)

    forwards = since_last_step(own & modules)
    backwards = since_last_step(tree.kind == BACKWARD)
    return int(((forwards > 0) & (backwards == 0)).sum())
