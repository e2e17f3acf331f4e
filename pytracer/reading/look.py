"""Finds what is wrong in a look, or who held its peak. `recording/always.py` runs it in a process of its own."""

import json
import sys
from collections.abc import Sequence

from pytracer.analysis.answers.findings import findings
from pytracer.analysis.facts import usage
from pytracer.reading import views

_MOST = 20  # a pipe holds them, so the process never waits to be read


def print_findings(words: Sequence[str]) -> None:
    """Prints the findings of a file about a device, as JSON."""
    path, device = words
    found = findings(views.read(path).data, device)[:_MOST]
    wanted = ("kind", "evidence", "change")
    sys.stdout.write(json.dumps([{name: getattr(each, name) for name in wanted} for each in found]))


def print_categories(words: Sequence[str]) -> None:
    """Prints what each device held at its peak, by category, as JSON."""
    (path,) = words
    trace = views.read(path).data
    peaks = {device: usage.peak(trace, device).by_category for device in usage.devices(trace)}
    told = [{"kind": "categories", "device": name, "bytes": held} for name, held in peaks.items()]
    sys.stdout.write(json.dumps(told, default=int))
