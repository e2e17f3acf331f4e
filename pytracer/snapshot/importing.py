"""A snapshot's tables as a Trace.

A snapshot has the blocks that the allocator held when it was taken, and the history before, as far
as torch kept it. So

- a block was alive before the history if the history frees it without allocating it, or if it is
  there at the end and the history never touches it. These blocks become the seeds;
- differences between the history and the blocks at the end (the history may have been stopped)
  become events at the end, and are counted as a loss.

Files that pytracer wrote (`t.export_memory_snapshot`) contain each block's category.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer import errors
from pytracer.basics import share_done
from pytracer.basics.ranges import Ranges
from pytracer.data.recorded import Trace
from pytracer.data.schema import (
    ACTION,
    CATEGORIES,
    CATEGORY,
    DEVICE_TYPES,
    I64,
    PHASE,
    PHASES,
    TABLES,
    U32,
)
from pytracer.snapshot.evidence import Decided, decide
from pytracer.snapshot.rows import (
    SPACING,
    Rows,
    entry_rows,
    firsts,
    joined,
    keys,
    numbered,
    spread,
    table,
    times,
)
from pytracer.snapshot.scopes import Scopes
from pytracer.snapshot.stacks import (
    ENGINE,
    FORWARD,
    NOTHING,
    OPTIMIZER,
    RECOMPUTE,
    UNCLEAR,
    shown,
)
from pytracer.snapshot.timeline import activities

# torch.profiler's own export of a snapshot names the categories differently.
_PROFILERS_WORDS = {
    "parameter": "weights",
    "gradient": "gradients",
    "optimizer_state": "optimizer_state",
    "activation": "activations",
    "input": "inputs",
    "temporary": "temporaries",
}
_ALLOC = ACTION["alloc"]
_FREE_COMPLETED = ACTION["free_completed"]

_ACTIVITY_OF_PHASE = {
    PHASE["forward"]: FORWARD,
    PHASE["backward"]: ENGINE,
    PHASE["recompute"]: RECOMPUTE,
    PHASE["optimizer"]: OPTIMIZER,
}


class Import:
    """One file, read in steps into a Trace."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns
        self.strings: list[str] = list(columns["strings"])
        self.string_rows = {text: row for row, text in enumerate(self.strings)}
        self.segments, self.blocks = table(columns, "segments"), table(columns, "blocks")
        self.stacks = table(columns, "stacks")
        self.ours = _our_document(columns["pytracer"])
        self.losses = dict(columns["losses"])
        self.notes: list[str] = []
        self.lacks: list[str] = []
        entries = self._without_our_frames(table(columns, "entries"))
        # Our Trace has a snapshot event before its seeds. Such entries of the file are dropped.
        entries = entries.take(np.flatnonzero(entries.action != ACTION["snapshot"]))
        self.seed_entries, entries = self._split_seeds(entries)
        time = times(entries)
        order = np.argsort(time, kind="stable")
        phases = self._our_phases(entries)[order]
        self.entries, self.time, self.phases = entries.take(order), spread(time[order]), phases
        if len(entries) and (entries.time_us < 0).any():
            self.notes.append(
                "this snapshot has no times: its events are placed a microsecond apart"
            )

    def _without_our_frames(self, entries: Rows) -> Rows:
        """Drops the frame with the block's category that begins each stack in pytracer's files."""
        if self.ours:
            names = np.isin(np.array(self.strings, object), CATEGORIES)
            is_category = names[self.stacks.file] & (self.stacks.line == 0)
            stack = entries.stack
            outer = self.stacks.parent[stack]
            entries.columns["stack"] = np.where(is_category[stack], outer, stack)
        return entries

    # ------------------------------------------------------------ what was alive before

    def _split_seeds(self, entries: Rows) -> tuple[Rows, Rows]:
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

    def _our_phases(self, entries: Rows) -> I64:
        """Returns the activity of each entry by the phases that pytracer's files contain."""
        activity = np.full(len(entries), UNCLEAR, np.int64)
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
                    by_phase = [_ACTIVITY_OF_PHASE.get(n, NOTHING) for n in range(len(PHASES))]
                    each = np.array(by_phase)[np.where(has_activity, each, 0)]
                    activity[own[: len(each)]] = each
        return activity

    def _seeds(self) -> Rows:
        """Returns the blocks that were alive before the first entry, as entries."""
        if self.ours:
            return self.seed_entries
        entries, blocks = self.entries, self._active_blocks()
        moves = np.flatnonzero(entries.action <= _FREE_COMPLETED)
        first = moves[firsts(entries.device[moves], entries.address[moves])]
        freed = entries.take(first[entries.action[first] != _ALLOC])
        seen = keys(entries.device[moves], entries.address[moves])
        untouched = ~np.isin(keys(blocks.device, blocks.address), seen)
        old = blocks.take(np.flatnonzero(untouched))
        # These entries are frees: their stacks do not show who allocated the blocks.
        freed.columns["stack"] = np.zeros(len(freed), np.uint32)
        return joined(freed, old)

    def _active_blocks(self) -> Rows:
        """Returns the blocks in use at the end, with the columns of entries."""
        blocks = self.blocks.take(np.flatnonzero(self.blocks.state != 0))
        segments = self.segments.take(blocks.segment)
        none = np.zeros(len(blocks), np.uint32)
        return Rows(
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

    def _late(self) -> Rows:
        """Returns frees and allocations, at the end, that the history lacks but the blocks show."""
        entries, blocks = self.entries, self._active_blocks()
        if self.ours:
            return entries.take(np.zeros(0, np.intp))
        moves = np.flatnonzero(entries.action <= _FREE_COMPLETED)
        last = moves[firsts(entries.device[moves][::-1], entries.address[moves][::-1], -1)]
        lasts = entries.take(last)
        alive_by_history = lasts.action != _FREE_COMPLETED
        gone = alive_by_history & ~np.isin(
            keys(lasts.device, lasts.address), keys(blocks.device, blocks.address)
        )
        freed = lasts.take(np.flatnonzero(gone))
        freed.columns["action"] = np.full(len(freed), _FREE_COMPLETED, np.uint8)
        freed_keys = keys(lasts.device, lasts.address)[~alive_by_history]
        came = np.isin(keys(blocks.device, blocks.address), freed_keys)
        made = blocks.take(np.flatnonzero(came))
        if len(freed) + len(made):
            self.losses["after_history"] = len(freed) + len(made)
        return joined(freed, made)

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
        """All of it."""
        seeds, late = self._seeds(), self._late()
        parts = [*self._beginning(seeds), self.entries, late]
        events = joined(*parts)
        before, after = len(events) - len(self.entries) - len(late), len(late)
        begin = int(self.time[0]) if len(self.time) else 0
        end = int(self.time[-1]) if len(self.time) else 0
        ticks = np.concatenate(
            [
                np.full(before, begin - SPACING),
                self.time,
                end + SPACING * (1 + np.arange(after)),
            ]
        ).astype(np.int64)
        seen = shown(self.stacks, self.strings)
        annotations = table(self.columns, "annotations")
        scopes_ = Scopes(
            events, ticks, before, annotations, self.stacks, self.strings, seen, self.string
        )
        if self.ours:
            activity = np.full(len(events), NOTHING, np.int64)
            activity[before : before + len(self.phases)] = self.phases
            labels = self._labels(events, None)
        else:
            doing = scopes_.annotated(activities(events, seen, before))
            activity = doing.activity
            decided = decide(events, self.stacks.parent, seen, doing, before)
            self.lacks = decided.lacks
            labels = self._labels(events, decided)
        share_done.tell(0.65)
        scope, scopes, scope_ends = scopes_.build(activity)
        share_done.tell(0.95)
        return self._finish(path, events, ticks, scope, scopes, scope_ends, labels)

    def _beginning(self, seeds: Rows) -> list[Rows]:
        """Returns, for each device, the snapshot event, its seeds and its held segments."""
        held = self._seed_segments()
        devices = {int(d) for rows in (seeds, self.entries, self.segments) for d in rows.device}
        parts = []
        for device in sorted(devices):
            parts.append(entry_rows("snapshot", [(device, 0, 0)]))
            own = seeds.take(np.flatnonzero(seeds.device == device))
            own.columns["action"] = np.full(len(own), ACTION["seed"], np.uint8)
            parts.append(own)
            if self._device_name(device) != "cpu":
                parts.append(entry_rows("seed_segment", [h for h in held if h[0] == device]))
        return parts

    def _device_name(self, device: int) -> str:
        names = self.ours.get("devices")
        if isinstance(names, list) and device < len(names) and names[device] == "cpu":
            return "cpu"
        return f"cuda:{device}"

    def _labels(self, events: Rows, decided: Decided | None) -> I64:
        """Returns the row of the label table for each event, 0 for none."""
        self.label_rows: list[tuple[int, int, int, int, int]] = [(0, 0, 0, 0, 0)]
        row = np.zeros(len(events), np.int64)
        is_new = (events.action == _ALLOC) | (events.action == ACTION["seed"])
        category_and_metadata = events.category.astype(np.int64) << 32 | events.metadata
        annotated = np.flatnonzero(is_new & (events.category != 0))
        distinct, which = np.unique(category_and_metadata[annotated], return_inverse=True)
        texts = [(self.strings[k >> 32], self.strings[k & 0xFFFFFFFF]) for k in distinct.tolist()]
        labels = [self._label_of(*text) for text in texts]
        row[annotated] = np.array(labels, np.int64)[which]
        if decided is not None:
            rows: dict[tuple[int, str], int] = {}
            for i in np.flatnonzero(is_new & (row == 0) & (decided.category != 0)).tolist():
                key = int(decided.category[i]), str(decided.evidence[i])
                if key not in rows:
                    rows[key] = self._add_label(*key, "")
                row[i] = rows[key]
        return row

    def _label_of(self, category: str, metadata: str) -> int:
        name = _PROFILERS_WORDS.get(category, category)
        if name not in CATEGORIES[1:]:
            return 0
        role, _, tensor = metadata.partition("\n") if self.ours else ("", "", "")
        return self._add_label(CATEGORY[name], role, tensor)

    def _add_label(self, category: int, role: str, tensor: str) -> int:
        self.label_rows.append((category, self.string(role), self.string(tensor), 0, 0))
        return len(self.label_rows) - 1

    def string(self, text: str) -> int:
        """Returns the row of a text, and adds it if it is new."""
        if text not in self.string_rows:
            self.string_rows[text] = len(self.strings)
            self.strings.append(text)
        return self.string_rows[text]

    def _finish(
        self,
        path: Path,
        events: Rows,
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

    def _places(self, events: Rows) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        table = np.column_stack(
            [
                events.device.astype(np.uint64),
                events.stream,
                events.pool_high,
                events.pool_low,
            ]
        )
        _, first, place = np.unique(numbered(*table.T), return_index=True, return_inverse=True)
        distinct = table[first]
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
            "lacks": self._lacks(),
            "counters": {"end": end},
        }
        if isinstance(self.ours.get("directory"), str):
            meta["directory"] = self.ours["directory"]
        return meta

    def _lacks(self) -> list[str]:
        """What the file would need to tell more, the most important first."""
        if self.ours:
            return []
        says = {
            "history": len(self.entries) == 0,
            "stacks": not (self.entries.stack.any() or self._active_blocks().stack.any()),
        }
        return [name for name, lacks in says.items() if lacks] + self.lacks

    def _requested(self, device: int) -> int:
        """Returns the requested bytes in use. Older versions of torch write no sum per segment."""
        is_here = self.segments.device == device
        total = int(self.segments.requested[is_here].sum())
        if total:
            return total
        used = is_here[self.blocks.segment] & (self.blocks.state != 0)
        return int(self.blocks.requested[used].sum())


_SEGMENT_ACTIONS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")


def _our_document(text: str) -> dict[str, Any]:
    """Returns the document that pytracer's export adds; {} if there is none, or it is no object."""
    try:
        document = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
