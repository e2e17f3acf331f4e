"""Writes files of step totals, as csrc/core/step_rows.cpp does."""

from collections.abc import Iterable

from pytracer.data.step_totals import ROW, StepFile, StepRow


def add(file: StepFile, rows: Iterable[StepRow]) -> None:
    """Adds rows to a file that is new, or to which only this has added."""
    room, written = file.room(), 0
    for row in rows:
        if (written + 1) * ROW.size > len(room):
            room.release()
            room, written = file.room(written), 0
        peaks = [row.peak] * 3
        begin = (row.step, row.unix_ns, row.duration_ns, *peaks, row.now, row.reserved_peak)
        end = (row.largest, row.requests, row.failed, *row.device, 0, row.looked_at, 1)
        ROW.pack_into(room, written * ROW.size, *begin, *end)
        written += 1
    room.release()
    file.room(written).release()
