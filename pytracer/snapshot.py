"""Reads memory snapshots of torch (`torch.cuda.memory._dump_snapshot`) as a Trace.

csrc/core/pickle.h reads the file and executes nothing. A snapshot has the blocks that the allocator
held when it was taken, and the history before, as far as torch kept it. So

- a block was alive before the history if the history frees it without allocating it, or if it is
  there at the end and the history never touches it. These blocks become the seeds;
- differences between the history and the blocks at the end (the history may have been stopped)
  become events at the end, and are counted as a loss.

A snapshot has no modules, operators or categories. Its Python frames show some of them, and the
Trace has only those:

| in the snapshot                                               | becomes                    |
|---------------------------------------------------------------|----------------------------|
| a call of a module (torch/nn/modules/module.py: _call_impl)   | forward                    |
| a frame of the engine, or no frame where others have some     | backward (its own threads) |
| a module's call inside of that                                | recompute                  |
| the annotation of an optimizer's step, or its frame           | optimizer                  |
| allocated in an optimizer's _init_group                       | optimizer_state            |
| allocated in a module's __init__, or moved by it              | weights                    |
| freed in zero_grad                                            | gradients                  |

Files that pytracer wrote (`t.export_memory_snapshot`) contain each block's category.
"""

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer import errors
from pytracer._native import core
from pytracer.ranges import Ranges
from pytracer.recorded import Trace
from pytracer.schema import (
    ACTION,
    CATEGORIES,
    CATEGORY,
    DEVICE_TYPES,
    I64,
    PHASE,
    PHASES,
    SCOPE_KIND,
    TABLES,
    U8,
    U32,
    U64,
)

# torch.profiler's own export of a snapshot names the categories differently.
_PROFILERS_WORDS = {
    "parameter": "weights",
    "gradient": "gradients",
    "optimizer_state": "optimizer_state",
    "activation": "activations",
    "input": "inputs",
    "temporary": "temporaries",
}
_SPACING = 8  # least nanoseconds between events, so that scopes can begin and end in between

_ALLOC, _FREE_REQUESTED = ACTION["alloc"], ACTION["free_requested"]
_FREE_COMPLETED = ACTION["free_completed"]

# The activity that an event's stack shows. Without a stack of its own it is _UNCLEAR, and the
# event before it decides.
_UNCLEAR, _NOTHING, _FORWARD, _ENGINE, _RECOMPUTE, _OPTIMIZER = range(-1, 5)

_ACTIVITY_OF_PHASE = {
    PHASE["forward"]: _FORWARD,
    PHASE["backward"]: _ENGINE,
    PHASE["recompute"]: _RECOMPUTE,
    PHASE["optimizer"]: _OPTIMIZER,
}

Mask = NDArray[np.bool_]


def is_snapshot(path: str | Path) -> bool:
    """Whether the file begins like a pickle. False if it cannot be read."""
    try:
        if not Path(path).is_file():  # opening a pipe would wait for a writer
            return False
        with Path(path).open("rb") as file:
            head = file.read(2)
    except OSError:
        return False
    return len(head) == 2 and head[0] == 0x80 and head[1] <= 5


def load(path: str | Path) -> Trace:
    """Reads a memory snapshot of torch.

    Raises:
        errors.UnreadableTrace: the file is no snapshot, is cut short, or would run code.
    """
    try:
        columns = core.read_snapshot(os.fsencode(path))
    except core.FileError as error:
        raise errors.UnreadableTrace(str(error)) from None
    return _Import(columns).trace(Path(path))


@dataclass(frozen=True)
class _Rows:
    """The columns of one of the snapshot's tables."""

    columns: dict[str, NDArray[Any]]

    def __getattr__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def take(self, rows: NDArray[Any]) -> "_Rows":
        return _Rows({name: column[rows] for name, column in self.columns.items()})


def _table(columns: dict[str, Any], name: str) -> _Rows:
    prefix = f"{name}."
    return _Rows({k[len(prefix) :]: v for k, v in columns.items() if k.startswith(prefix)})


class _Import:
    """One file, read in steps into a Trace."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns
        self.strings: list[str] = list(columns["strings"])
        self.string_rows = {text: row for row, text in enumerate(self.strings)}
        self.segments, self.blocks = _table(columns, "segments"), _table(columns, "blocks")
        self.stacks = _table(columns, "stacks")
        self.ours = _our_document(columns["pytracer"])
        self.losses = dict(columns["losses"])
        self.notes: list[str] = []
        entries = self._without_our_frames(_table(columns, "entries"))
        # Our Trace has a snapshot event before its seeds. Such entries of the file are dropped.
        entries = entries.take(np.flatnonzero(entries.action != ACTION["snapshot"]))
        self.seed_entries, entries = self._split_seeds(entries)
        time = _times(entries)
        order = np.argsort(time, kind="stable")
        phases = self._our_phases(entries)[order]
        self.entries, self.time, self.phases = entries.take(order), _spread(time[order]), phases
        if len(entries) and (entries.time_us < 0).any():
            self.notes.append(
                "this snapshot has no times: its events are placed a microsecond apart"
            )

    def _without_our_frames(self, entries: _Rows) -> _Rows:
        """Drops the frame with the block's category that begins each stack in pytracer's files."""
        if self.ours:
            names = np.isin(np.array(self.strings, object), CATEGORIES)
            is_category = names[self.stacks.file] & (self.stacks.line == 0)
            stack = entries.stack
            outer = self.stacks.parent[stack]
            entries.columns["stack"] = np.where(is_category[stack], outer, stack)
        return entries

    # ------------------------------------------------------------ what was alive before

    def _split_seeds(self, entries: _Rows) -> tuple[_Rows, _Rows]:
        """Splits off the seeds: pytracer's files begin with them, as allocations."""
        seeds = self.ours.get("seeds")
        first = np.zeros(len(entries), np.bool_)
        if isinstance(seeds, list):
            for device, count in enumerate(seeds):
                own = np.flatnonzero(entries.device == device)
                if isinstance(count, int):
                    first[own[: max(count, 0)]] = True
        first &= entries.action == _ALLOC
        return entries.take(np.flatnonzero(first)), entries.take(np.flatnonzero(~first))

    def _our_phases(self, entries: _Rows) -> I64:
        """Returns the activity of each entry by the phases that pytracer's files contain."""
        activity = np.full(len(entries), _UNCLEAR, np.int64)
        runs, seeds = self.ours.get("phases"), self.seed_entries.device
        if not isinstance(runs, list):
            return activity
        for device, own_runs in enumerate(runs):
            own = np.flatnonzero(entries.device == device)
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                numbers, counts = np.array(own_runs, np.int64).reshape(-1, 2).T
                counts = counts.clip(0, len(own) + len(seeds))
                if counts.sum() < 2 * (len(own) + len(seeds)) + 2:
                    each = np.repeat(numbers, counts)[int((seeds == device).sum()) :][: len(own)]
                    has_activity = np.isin(each, list(_ACTIVITY_OF_PHASE))
                    by_phase = [_ACTIVITY_OF_PHASE.get(n, _NOTHING) for n in range(len(PHASES))]
                    each = np.array(by_phase)[np.where(has_activity, each, 0)]
                    activity[own[: len(each)]] = each
        return activity

    def _seeds(self) -> _Rows:
        """Returns the blocks that were alive before the first entry, as entries."""
        if self.ours:
            return self.seed_entries
        entries, blocks = self.entries, self._active_blocks()
        moves = np.flatnonzero(entries.action <= _FREE_COMPLETED)
        first = moves[_firsts(entries.device[moves], entries.address[moves])]
        freed = entries.take(first[entries.action[first] != _ALLOC])
        seen = _keys(entries.device[moves], entries.address[moves])
        untouched = ~np.isin(_keys(blocks.device, blocks.address), seen)
        old = blocks.take(np.flatnonzero(untouched))
        # These entries are frees: their stacks do not show who allocated the blocks.
        freed.columns["stack"] = np.zeros(len(freed), np.uint32)
        return _joined(freed, old)

    def _active_blocks(self) -> _Rows:
        """Returns the blocks in use at the end, with the columns of entries."""
        blocks = self.blocks.take(np.flatnonzero(self.blocks.state != 0))
        segments = self.segments.take(blocks.segment)
        none = np.zeros(len(blocks), np.uint32)
        return _Rows(
            {
                "device": segments.device,
                "action": np.full(len(blocks), _ALLOC, np.uint8),
                "address": blocks.address,
                "bytes": blocks.requested,
                "stream": segments.stream,
                "pool_high": segments.pool_high,
                "pool_low": segments.pool_low,
                "time_us": np.full(len(blocks), -1, np.int64),
                "stack": blocks.stack,
                "category": none,
                "metadata": none,
                "state": blocks.state,
            }
        )

    def _late(self) -> _Rows:
        """Returns frees and allocations, at the end, that the history lacks but the blocks show."""
        entries, blocks = self.entries, self._active_blocks()
        if self.ours:
            return entries.take(np.zeros(0, np.intp))
        moves = np.flatnonzero(entries.action <= _FREE_COMPLETED)
        last = moves[_firsts(entries.device[moves][::-1], entries.address[moves][::-1], -1)]
        lasts = entries.take(last)
        alive_by_history = lasts.action != _FREE_COMPLETED
        gone = alive_by_history & ~np.isin(
            _keys(lasts.device, lasts.address), _keys(blocks.device, blocks.address)
        )
        freed = lasts.take(np.flatnonzero(gone))
        freed.columns["action"] = np.full(len(freed), _FREE_COMPLETED, np.uint8)
        freed_keys = _keys(lasts.device, lasts.address)[~alive_by_history]
        came = np.isin(_keys(blocks.device, blocks.address), freed_keys)
        made = blocks.take(np.flatnonzero(came))
        if len(freed) + len(made):
            self.losses["after_history"] = len(freed) + len(made)
        return _joined(freed, made)

    def _seed_segments(self) -> list[tuple[int, int, int]]:
        """Returns device, address and size of the segments held before the first entry.

        It starts from the segments at the end, and undoes the entries in reverse.
        """
        held: dict[int, Ranges[None]] = {}
        segments, entries = self.segments, self.entries
        columns = (segments.device.tolist(), segments.address.tolist(), segments.bytes.tolist())
        for device, begin, size in zip(*columns, strict=True):
            held.setdefault(device, Ranges()).add(begin, begin + size, None)
        kinds = [ACTION[name] for name in _SEGMENT_ACTIONS]
        given_back = (ACTION["segment_free"], ACTION["segment_unmap"])
        for i in np.flatnonzero(np.isin(entries.action, kinds))[::-1].tolist():
            ranges = held.setdefault(int(entries.device[i]), Ranges())
            begin = int(entries.address[i])
            end = begin + int(entries.bytes[i])
            if int(entries.action[i]) in given_back:
                ranges.add(begin, end, None)
            else:
                ranges.remove(begin, end)
        return [
            (device, begin, end - begin)
            for device, ranges in held.items()
            for begin, end, _ in ranges
        ]

    # ------------------------------------------------------------ the trace

    def trace(self, path: Path) -> Trace:
        seeds, late = self._seeds(), self._late()
        parts = [*self._beginning(seeds), self.entries, late]
        events = _joined(*parts)
        before, after = len(events) - len(self.entries) - len(late), len(late)
        begin = int(self.time[0]) if len(self.time) else 0
        end = int(self.time[-1]) if len(self.time) else 0
        ticks = np.concatenate(
            [
                np.full(before, begin - _SPACING),
                self.time,
                end + _SPACING * (1 + np.arange(after)),
            ]
        ).astype(np.int64)
        scope, scopes, scope_ends = _Scopes(self, events, ticks, before).build()
        labels = self._labels(events)
        return self._finish(path, events, ticks, scope, scopes, scope_ends, labels)

    def _beginning(self, seeds: _Rows) -> list[_Rows]:
        """Returns, for each device, the snapshot event, its seeds and its held segments."""
        held = self._seed_segments()
        devices = {int(d) for rows in (seeds, self.entries, self.segments) for d in rows.device}
        parts = []
        for device in sorted(devices):
            parts.append(_entry_rows("snapshot", [(device, 0, 0)]))
            own = seeds.take(np.flatnonzero(seeds.device == device))
            own.columns["action"] = np.full(len(own), ACTION["seed"], np.uint8)
            parts.append(own)
            if self._device_name(device) != "cpu":
                parts.append(_entry_rows("seed_segment", [h for h in held if h[0] == device]))
        return parts

    def _device_name(self, device: int) -> str:
        names = self.ours.get("devices")
        if isinstance(names, list) and device < len(names) and names[device] == "cpu":
            return "cpu"
        return f"cuda:{device}"

    def _labels(self, events: _Rows) -> I64:
        """Returns the row of the label table for each event, 0 for none."""
        self.label_rows: list[tuple[int, int, int, int, int]] = [(0, 0, 0, 0, 0)]
        row = np.zeros(len(events), np.int64)
        is_new = (events.action == _ALLOC) | (events.action == ACTION["seed"])
        category_and_metadata = events.category.astype(np.int64) << 32 | events.metadata
        annotated = np.flatnonzero(is_new & (events.category != 0))
        keys, which = np.unique(category_and_metadata[annotated], return_inverse=True)
        texts = [(self.strings[k >> 32], self.strings[k & 0xFFFFFFFF]) for k in keys.tolist()]
        labels = [self._label_of(*text) for text in texts]
        row[annotated] = np.array(labels, np.int64)[which]
        if not self.ours:
            by_stack = _categories_by_stack(self)[events.stack]
            for category in ("weights", "optimizer_state"):
                here = is_new & (row == 0) & (by_stack == CATEGORY[category])
                if here.any():
                    row[here] = self._label_of(category, "")
            gradients = self._freed_in_zero_grad(events) & (row == 0)
            if gradients.any():
                row[gradients] = self._label_of("gradients", "")
        return row

    def _label_of(self, category: str, metadata: str) -> int:
        name = _PROFILERS_WORDS.get(category, category)
        if name not in CATEGORIES[1:]:
            return 0
        role, _, tensor = metadata.partition("\n") if self.ours else ("", "", "")
        self.label_rows.append((CATEGORY[name], self.string(role), self.string(tensor), 0, 0))
        return len(self.label_rows) - 1

    def _freed_in_zero_grad(self, events: _Rows) -> Mask:
        """Marks allocations that the zero_grad of an optimizer or module freed: gradients."""
        clears = _rows_with(self, lambda file, name: name == "zero_grad" and _is_torchs(file))
        result = np.zeros(len(events), np.bool_)
        if not clears.any():
            return result
        keys = _keys(events.device, events.address)
        order = np.argsort(keys, kind="stable")  # by block, and by time
        made = ((events.action == _ALLOC) | (events.action == ACTION["seed"]))[order]
        freed = (events.action == _FREE_REQUESTED) & clears[events.stack] & (events.stack != 0)
        last = np.maximum.accumulate(np.where(made, np.arange(len(order)), 0))[freed[order]]
        last = last[made[last] & (keys[order[last]] == keys[order[freed[order]]])]
        result[order[last]] = True
        return result

    def string(self, text: str) -> int:
        """Returns the row of a text, and adds it if it is new."""
        if text not in self.string_rows:
            self.string_rows[text] = len(self.strings)
            self.strings.append(text)
        return self.string_rows[text]

    def _finish(
        self,
        path: Path,
        events: _Rows,
        ticks: I64,
        scope: U32,
        scopes: dict[str, NDArray[Any]],
        scope_ends: dict[str, NDArray[Any]],
        label: I64,
    ) -> Trace:
        place, places = self._places(events)
        # A label comes right after the event of its block.
        labelled = np.flatnonzero(label)
        rows = {
            "ticks": ticks,
            "address": events.address,
            "bytes": events.bytes,
            "action": events.action,
            "scope": scope,
            "place": place,
            "thread": np.zeros(len(events), np.uint16),
        }
        for name, column in rows.items():
            extra = column[labelled]
            if name == "bytes":
                extra = label[labelled]
            elif name == "action":
                extra = np.full(len(labelled), ACTION["label"])
            rows[name] = np.insert(column, labelled + 1, extra)
        origin = int(ticks[0]) if len(ticks) else 0
        span = max(int(ticks[-1]) - origin, 2_000_000) if len(ticks) else 2_000_000
        columns: dict[str, Any] = {
            "strings": self.strings,
            "losses": self.losses,
            "meta": json.dumps(self._meta()),
            **{f"stacks.{name}": values for name, values in self.stacks.columns.items()},
            **{f"places.{name}": values for name, values in places.items()},
            **{f"events.{name}": values for name, values in rows.items()},
            **{f"scopes.{name}": values for name, values in scopes.items()},
            **{f"scope_ends.{name}": values for name, values in scope_ends.items()},
            "threads.native_id": np.zeros(1),
            "threads.name": np.zeros(1),
            "clock.ticks": np.array([origin, origin + span]),
            "clock.unix_ns": np.array([origin, origin + span]),
        }
        names = TABLES["labels"][0]._fields
        for i, name in enumerate(names):
            columns[f"labels.{name}"] = np.array([row[i] for row in self.label_rows])
        report = {"status": "complete", "version": "memory snapshot", "notes": self.notes}
        return Trace.from_columns(columns, {**report, "total_bytes": path.stat().st_size})

    def _places(self, events: _Rows) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        table = np.column_stack(
            [
                events.device.astype(np.uint64),
                events.stream,
                events.pool_high,
                events.pool_low,
            ]
        )
        distinct, place = np.unique(table, axis=0, return_inverse=True)
        if len(distinct) >= 2**16:
            raise errors.UnreadableTrace(
                f"{len(distinct):,} streams and pools are more than a snapshot of torch can have"
            )
        cpu, cuda = DEVICE_TYPES.index("cpu"), DEVICE_TYPES.index("cuda")
        is_cpu = np.array([self._device_name(int(d)) == "cpu" for d in distinct[:, 0]], np.bool_)
        none = np.zeros(1, np.uint64)
        places = {
            "stream": np.concatenate([none, distinct[:, 1]]),
            "pool_high": np.concatenate([none, distinct[:, 2]]),
            "pool_low": np.concatenate([none, distinct[:, 3]]),
            "device_type": np.concatenate([none, np.where(is_cpu, cpu, cuda)]),
            "device_index": np.concatenate([none, np.where(is_cpu, 0, distinct[:, 0])]),
        }
        return place.reshape(-1) + 1, places

    def _meta(self) -> dict[str, Any]:
        """Returns the meta document. The allocator's counters are sums over its segments."""
        segments = self.segments
        end = {}
        for device in np.unique(segments.device).tolist():
            own = segments.device == device
            if self._device_name(device) == "cpu":
                continue
            end[self._device_name(device)] = {
                "requested_bytes.current": self._requested(device),
                "allocated_bytes.current": int(segments.allocated[own].sum()),
                "reserved_bytes.current": int(segments.bytes[own].sum()),
            }
        meta: dict[str, Any] = {
            "imported": "pytracer" if self.ours else "memory_snapshot",
            "allocator_settings": dict(self.columns["settings"]),
            "counters": {"end": end},
        }
        if isinstance(self.ours.get("directory"), str):
            meta["directory"] = self.ours["directory"]
        return meta

    def _requested(self, device: int) -> int:
        """Returns the requested bytes in use. Older versions of torch write no sum per segment."""
        is_here = self.segments.device == device
        total = int(self.segments.requested[is_here].sum())
        if total:
            return total
        used = is_here[self.blocks.segment] & (self.blocks.state != 0)
        return int(self.blocks.requested[used].sum())


_SEGMENT_ACTIONS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")


# ---------------------------------------------------------------- scopes


class _Scopes:
    """Phases and lines as scopes, from the stacks and the annotations."""

    def __init__(self, owner: _Import, events: _Rows, ticks: I64, before: int) -> None:
        self.owner, self.events, self.ticks, self.before = owner, events, ticks, before
        # begin, end, parent, name, kind, stack; numbered from 1
        self.rows: list[tuple[int, int, int, int, int, int]] = []

    def build(self) -> tuple[U32, dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        count = len(self.events)
        scope = np.zeros(count, np.int64)
        has_annotated_steps = self._annotations()
        if self.owner.ours:
            activity = np.full(count, _UNCLEAR, np.int64)
            end = self.before + len(self.owner.phases)
            activity[self.before : end] = self.owner.phases
        else:
            activity = self._activity_by_stack()
        if has_annotated_steps:  # they are scopes already
            activity[activity == _OPTIMIZER] = _NOTHING
        self._phases(activity, scope)
        self._lines(scope)
        return self._tables(scope)

    def _activity_by_stack(self) -> I64:
        """Returns the activity of each event by its stack.

        A free may only repeat the stack of its allocation, which then shows nothing of the free.
        """
        events = self.events
        activity = _activities(self.owner)[events.stack]
        has_frames = bool((events.stack[self.before :] != 0).any())
        frameless = events.stack == 0
        activity[frameless] = _ENGINE if has_frames else _UNCLEAR
        is_free = np.isin(events.action, (_FREE_REQUESTED, _FREE_COMPLETED))
        keys = _keys(events.device, events.address)
        order = np.lexsort((np.arange(len(keys)), keys))
        same = np.append(False, keys[order][1:] == keys[order][:-1])
        repeats = np.zeros(len(keys), np.bool_)
        stack = events.stack[order]
        repeats[order] = same & (stack == np.append(0, stack[:-1]))
        activity[is_free & repeats] = _UNCLEAR
        # Segments come and go inside of an allocation, and show no activity of their own.
        activity[events.action > _FREE_COMPLETED] = _UNCLEAR
        activity[: self.before] = _NOTHING
        clear = np.where(activity != _UNCLEAR, np.arange(len(activity)), 0)
        filled: I64 = activity[np.maximum.accumulate(clear)] if len(activity) else activity
        return filled

    def _annotations(self) -> bool:
        """Adds user annotations as scopes. Returns whether optimizers' steps are among them."""
        rows, strings = _table(self.owner.columns, "annotations"), self.owner.strings
        if len(rows) == 0 or len(self.ticks) == 0:
            return False
        open_: dict[int, list[int]] = {}
        has_steps = False
        rows = rows.take(np.flatnonzero(rows.device == rows.device.min()))
        order = np.argsort(rows.time_us, kind="stable")
        for i in order.tolist():
            name, time = int(rows.name[i]), int(rows.time_us[i]) * 1000
            if strings[rows.stage[i]] == "START":
                open_.setdefault(name, []).append(time)
            elif open_.get(name):
                begin = max(open_[name].pop(), int(self.ticks[0]))
                if time <= begin:
                    continue  # over before the history begins
                step = strings[name].startswith("Optimizer.step")
                has_steps |= step
                kind = SCOPE_KIND["optimizer" if step else "user"]
                self.rows.append((begin, time, 0, name, kind, 0))
        return has_steps

    def _phases(self, activity: I64, scope: I64) -> None:
        group = np.where(activity == _RECOMPUTE, _ENGINE, activity)
        kinds = {_FORWARD: "module", _ENGINE: "backward", _OPTIMIZER: "optimizer"}
        for first, last in _runs(group):
            kind = kinds.get(int(group[first]))
            if kind is None:
                continue
            number = self._add(first, last, 3, 0, kind, "")
            scope[first : last + 1] = number
            if kind == "backward":
                inner = activity[first : last + 1] == _RECOMPUTE
                for begin, end in _runs(inner.astype(np.int64)):
                    if inner[begin]:
                        again = self._add(first + begin, first + end, 2, number, "module", "")
                        scope[first + begin : first + end + 1] = again

    def _lines(self, scope: I64) -> None:
        """Adds a scope with the stack around allocations that share one."""
        stack = self.events.stack.astype(np.int64)
        stack[self.events.action != _ALLOC] = -1
        stack[: self.before] = -1
        names = self.owner.stacks.function
        together = stack * (len(self.rows) + 1) + scope
        together[stack <= 0] = -1
        for first, last in _runs(together):
            if together[first] >= 0:
                row = int(stack[first])
                name = self.owner.strings[int(names[row])]
                number = self._add(first, last, 1, int(scope[first]), "user", name, row)
                scope[first : last + 1] = number

    def _add(
        self, first: int, last: int, room: int, parent: int, kind: str, name: str, stack: int = 0
    ) -> int:
        begin, end = int(self.ticks[first]) - room, int(self.ticks[last]) + room
        row = (begin, end, parent, self.owner.string(name), SCOPE_KIND[kind], stack)
        self.rows.append(row)
        return len(self.rows)

    def _tables(self, scope: I64) -> tuple[U32, dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Returns the tables of scopes in the order of their begins, as a recording has them."""
        table = np.array(self.rows, np.int64).reshape(-1, 6)
        order = np.argsort(table[:, 0], kind="stable")
        number = np.zeros(len(table) + 1, np.int64)
        number[1 + order] = 1 + np.arange(len(table))
        begins = table[order]
        none = np.zeros(len(table))
        scopes = {
            "ticks": begins[:, 0],
            "parent": number[begins[:, 2]],
            "forward": none,
            "name": begins[:, 3],
            "thread": none,
            "kind": begins[:, 4],
            "flags": none,
        }
        ends = np.argsort(table[:, 1], kind="stable")
        scope_ends = {
            "ticks": table[ends, 1],
            "scope": number[1 + ends],
            "stack": table[ends, 5],
        }
        return number[scope].astype(np.uint32), scopes, scope_ends


def _runs(values: NDArray[Any]) -> list[tuple[int, int]]:
    """Returns the first and last position of each run of equal values."""
    if len(values) == 0:
        return []
    cuts = np.flatnonzero(values[1:] != values[:-1])
    firsts = np.append(0, cuts + 1)
    return list(zip(firsts.tolist(), np.append(cuts, len(values) - 1).tolist(), strict=True))


# ---------------------------------------------------------------- stacks


def _is_torchs(file: str) -> bool:
    return "torch/optim/" in file or "torch/nn/modules/" in file


def _rows_with(owner: _Import, test: Callable[[str, str], bool]) -> Mask:
    """Marks the rows of the stack table whose frame, or a caller of it, passes the test."""
    stacks, strings = owner.stacks, owner.strings
    pairs = stacks.file.astype(np.int64) << 32 | stacks.function
    distinct, which = np.unique(pairs, return_inverse=True)
    passes = [test(strings[pair >> 32], strings[pair & 0xFFFFFFFF]) for pair in distinct.tolist()]
    own = np.array(passes, np.bool_)[which]
    own[0] = False
    for row, parent in enumerate(stacks.parent.tolist()):
        if own[parent]:
            own[row] = True
    return own


def _activity_of_frame(file: str, name: str, *, outermost: bool) -> int:
    if file.endswith("torch/nn/modules/module.py") and name in ("_call_impl", "_wrapped_call_impl"):
        return _FORWARD
    if "torch/optim/" in file and name == "step" and "lr_scheduler" not in file:
        return _OPTIMIZER
    if "autograd::Engine::" in name:
        return _ENGINE
    if file.endswith("torch/autograd/graph.py") and name == "_engine_run_backward":
        return _ENGINE
    if file.endswith("torch/autograd/__init__.py") and name in ("backward", "grad"):
        return _ENGINE
    # The engine's own threads begin in a backward written in Python, or in a checkpoint's hook.
    if outermost and file.endswith(("torch/autograd/function.py", "torch/utils/checkpoint.py")):
        return _ENGINE
    return _UNCLEAR


def _activities(owner: _Import) -> I64:
    """Returns the activity of each row of the stack table: that of its innermost clear frame."""
    stacks, strings = owner.stacks, owner.strings
    activity = np.full(len(stacks), _NOTHING, np.int64)
    in_engine = np.zeros(len(stacks), np.bool_)
    by_frame: dict[tuple[int, int, bool], int] = {}
    rows = zip(stacks.parent.tolist(), stacks.file.tolist(), stacks.function.tolist(), strict=True)
    for row, (parent, file, function) in enumerate(rows):
        if row == 0:
            continue
        key = (file, function, parent == 0)
        if key not in by_frame:
            names = strings[file], strings[function]
            by_frame[key] = _activity_of_frame(*names, outermost=parent == 0)
        own = by_frame[key]
        in_engine[row] = in_engine[parent] or own == _ENGINE
        activity[row] = activity[parent] if own == _UNCLEAR else own
        if activity[row] == _FORWARD and in_engine[row]:
            activity[row] = _RECOMPUTE
    return activity


def _categories_by_stack(owner: _Import) -> U8:
    """Returns, for each row of the stack table, the category of its blocks if that is certain."""
    categories = np.zeros(len(owner.stacks), np.uint8)
    makes_state = _rows_with(owner, lambda f, n: n == "_init_group" and "torch/optim/" in f)
    categories[makes_state] = CATEGORY["optimizer_state"]
    stacks, strings = owner.stacks, owner.strings
    for row, parent in enumerate(stacks.parent.tolist()):
        file, name = strings[stacks.file[row]], strings[stacks.function[row]]
        if "torch/nn/modules/" not in file:
            continue
        above = strings[stacks.function[parent]] if parent else ""
        if name == "__init__" or (name in ("convert", "<lambda>") and above == "_apply"):
            categories[row] = CATEGORY["weights"]
    return categories


# ---------------------------------------------------------------- rows


def _our_document(text: str) -> dict[str, Any]:
    """Returns the document that pytracer's export adds; {} if there is none, or it is no object."""
    try:
        document = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _keys(device: NDArray[Any], address: NDArray[Any]) -> U64:
    """Returns device and address as one number: addresses never use their highest byte."""
    keys: U64 = address ^ (device.astype(np.uint64) << np.uint64(56))
    return keys


def _firsts(device: NDArray[Any], address: NDArray[Any], step: int = 1) -> NDArray[np.intp]:
    """Returns where each block occurs first; where last, if `step` is -1 and arrays reversed."""
    _, first = np.unique(_keys(device, address), return_index=True)
    if step < 0:
        first = len(address) - 1 - first
    return np.sort(first)


def _joined(*parts: _Rows) -> _Rows:
    names = _COLUMNS
    return _Rows({n: np.concatenate([part.columns[n] for part in parts]) for n in names})


_COLUMNS = {
    "device": np.uint32,
    "action": np.uint8,
    "address": np.uint64,
    "bytes": np.uint64,
    "stream": np.uint64,
    "pool_high": np.uint64,
    "pool_low": np.uint64,
    "stack": np.uint32,
    "category": np.uint32,
    "metadata": np.uint32,
}


def _entry_rows(action: str, rows: list[tuple[int, int, int]]) -> _Rows:
    columns = {name: np.zeros(len(rows), dtype) for name, dtype in _COLUMNS.items()}
    columns["action"][:] = ACTION[action]
    for i, name in enumerate(("device", "address", "bytes")):
        columns[name][:] = [row[i] for row in rows]
    return _Rows(columns)


def _times(entries: _Rows) -> I64:
    """Returns times in nanoseconds. They never fall within a device: its entries are in order."""
    time = entries.time_us.clip(-1, 2**53) * 1000
    if (time < 0).any():
        time = np.arange(len(time), dtype=np.int64) * 1000
    for device in np.unique(entries.device):
        own = entries.device == device
        time[own] = np.maximum.accumulate(time[own])
    result: I64 = time
    return result


def _spread(time: I64) -> I64:
    """Returns the same times, at least _SPACING apart."""
    room = _SPACING * np.arange(len(time), dtype=np.int64)
    return np.maximum.accumulate(time - room) + room if len(time) else time
