"""The counters of problems in a recording, each with its severity and advice.

Nothing is lost silently: a counter that is missing in this table is shown as well.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from pytracer.data.schema import ACTIONS

Severity: TypeAlias = Literal["info", "warning", "loss"]


class Counter(NamedTuple):
    """A kind of problem that a recording can have."""

    name: str
    severity: Severity
    meaning: str
    advice: str


_MORE_ROOM = "Raise max_events, trace fewer steps, or write to a file with path=."
_REPORT = "If this repeats, please report it with the trace: pytracer missed an event."

# Counters about the file as a whole.
OF_FILES = frozenset(("truncated_file", "corrupt_file"))


def has_holes(losses: Mapping[str, int]) -> bool:
    """Whether rows are missing in the middle, so that a view may show the effect of the gap.

    A file without its end has no holes: it is right up to that point.
    """
    return any(
        name == "corrupt_file" or name.startswith("lost_") for name in losses if losses[name]
    )


# Seen twice and counted once, as intended.
HARMLESS = frozenset(("repeated_snapshots", "duplicate_seeds"))

COUNTERS: dict[str, Counter] = {
    counter.name: counter
    for counter in (
        *(
            Counter(
                f"lost_{action}",
                "loss",
                f"{action} events did not fit into the recording",
                _MORE_ROOM,
            )
            for action in ACTIONS
        ),
        Counter(
            "lost_scopes",
            "loss",
            "ops or modules did not fit: their allocations have no owner",
            _MORE_ROOM,
        ),
        Counter(
            "lost_unfinished_rows",
            "loss",
            "a thread was still writing when the trace was read",
            "Join the program's threads before the trace ends.",
        ),
        Counter(
            "truncated_file",
            "loss",
            "the file ends before its recording: it was killed, ran out of space or still goes on",
            "Events and sizes up to that moment are right. Categories of its last step may be wrong: "
            "some are known only when a step ends.",
        ),
        Counter(
            "corrupt_file",
            "loss",
            "parts of the file are damaged, missing or not its own, so any figure may be wrong",
            "Use another copy of the file, or record again.",
        ),
        Counter(
            "unreadable_meta",
            "loss",
            "the facts about the program and its options cannot be read",
            "Use another copy of the file, or record again.",
        ),
        Counter(
            "untimed_phases",
            "info",
            "phases without the device's time: the device had not reached their ends when the trace "
            "ended, or there were too many",
            "Nothing to do: the host's times are known. A trace does not wait for the device after an "
            "exception.",
        ),
        Counter(
            "before_snapshot",
            "info",
            "events from before the device's state was known, ignored",
            "Nothing to do: the snapshot describes the state after them.",
        ),
        Counter(
            "implicit_frees",
            "warning",
            "blocks were freed without an event: their address was used again",
            _REPORT,
        ),
        Counter(
            "unmatched_free_requests",
            "warning",
            "the program freed unknown blocks although the device's state was known",
            _REPORT,
        ),
        Counter(
            "unmatched_frees",
            "warning",
            "unknown blocks were freed although the device's state was known",
            _REPORT,
        ),
        Counter(
            "frees_from_before",
            "info",
            "blocks from before the trace were freed; the trace did not know them",
            "Start the trace earlier to count them.",
        ),
        Counter("repeated_free_requests", "warning", "blocks were given back twice", _REPORT),
        Counter(
            "unmatched_labels",
            "info",
            "tensors in memory that the allocator did not serve (files, numpy, shared memory, "
            "copy.deepcopy and pickle on the CPU)",
            "Nothing to do: the allocator did not serve these bytes, so they have no category.",
        ),
        Counter(
            "unmatched_saves",
            "info",
            "saved tensors in memory that is unknown or that the allocator did not serve",
            "Start the trace before these tensors are made to count them.",
        ),
        Counter(
            "allocator_disagrees",
            "warning",
            "bytes by which the events and the device allocator's own count of live bytes differ",
            "Run `pytracer doctor`; if its checks pass, please report it with the trace.",
        ),
        Counter(
            "callback_errors",
            "warning",
            "pytracer's own exceptions while it labelled blocks: some categories may be missing",
            "Please report it; the traced program was not disturbed.",
        ),
        Counter(
            "training_threads",
            "warning",
            "threads train at the same time: a trace records the whole process. Each has phases of "
            "its own, and the steps are those of all of them",
            "Train in processes of their own, to see the steps of each.",
        ),
        Counter(
            "weights_elsewhere",
            "warning",
            "weights lie on a device whose memory is not recorded",
            'Use trace(devices=...) with the model\'s device, or ["cpu", "cuda"] for both.',
        ),
        Counter(
            "foreign_parameters",
            "warning",
            "parameters of an optimizer that belong to no traced or called module",
            "Pass their model to trace(), or make the optimizer from the model that you train.",
        ),
        Counter(
            "steps_without_backward",
            "warning",
            "optimizer steps after a forward without a backward",
            "Call loss.backward() before optimizer.step().",
        ),
        Counter(
            "no_cuda_events",
            "loss",
            "CUDA memory was not recorded",
            "Run `pytracer doctor`: it shows what to do.",
        ),
        Counter(
            "no_calls",
            "loss",
            "modules or backward passes were not seen",
            "Please report it with the versions of torch and Python.",
        ),
        Counter(
            "lost_places",
            "warning",
            "events whose stream and pool are unknown: there are too many streams and pools",
            "The bytes are right; capture fewer CUDA graphs in one trace to tell pools apart.",
        ),
        Counter(
            "merged_threads",
            "warning",
            "threads beyond the first 65,535: they share one number, so they cannot be told apart",
            "Sizes, modules and lines are right. Trace fewer steps, or let the program reuse threads.",
        ),
        Counter(
            "forgotten_nodes",
            "warning",
            "backward nodes whose forward operator is unknown: the thread that made them has ended, "
            "and so have too many threads after it",
            "Sizes are right. Call backward before the thread ends, or let the program reuse threads.",
        ),
        Counter(
            "unknown_places", "loss", "events of a device that the trace does not name", _REPORT
        ),
        Counter(
            "after_history",
            "warning",
            "blocks came or went after the snapshot's own history had ended",
            "Take the snapshot before torch.cuda.memory._record_memory_history(enabled=None).",
        ),
        Counter(
            "unreadable_entries",
            "loss",
            "entries of the memory snapshot with an impossible size",
            "Record the snapshot again; this file may be damaged.",
        ),
        Counter(
            "unknown_actions",
            "loss",
            "events that this version does not know",
            "Read the trace with the version of pytracer that wrote it.",
        ),
    )
}


def counter(name: str) -> Counter:
    """The table's entry. A counter that is missing in the table gets one made of its name."""
    entry = COUNTERS.get(name)
    severity: Severity = "loss" if name.startswith("lost_") else "warning"
    return entry or Counter(name, severity, name.replace("_", " "), _REPORT)
