"""A page about memory that ran out between two looks: what was seen, and what that lets infer."""

from collections.abc import Iterator

from pytracer.analysis.answers import postmortem
from pytracer.analysis.facts import usage
from pytracer.basics.units import size_text
from pytracer.data.history import DeviceHistory, Look, Steps
from pytracer.data.recorded import Trace
from pytracer.export.postmortem import largest_lines
from pytracer.export.table import category_lines
from pytracer.export.terminal import PLAIN, RED, Terminal

SEEN, INFERRED = "seen", "inferred"


def render(history: Steps, look: Look, trace: Trace, terminal: Terminal = PLAIN) -> str:
    """The page, without a line break at its end; "" if no request failed that ended the program.

    Args:
        history: of the program.
        look: the last one.
        trace: its recording.
        terminal: where the page goes.
    """
    failed = [event for event in history.events if event["kind"] == "failed"]
    if not failed:
        return ""
    text, step = str(failed[-1]["text"]), int(failed[-1]["step"])
    device = _device(history, text)
    lines = [terminal.paint(f"out of memory in step {step:,}, between two looks", RED), ""]
    lines += terminal.paragraph(SEEN, text)
    for said in _totals(history, device, look):
        lines += terminal.paragraph(SEEN, said)
    if device.device in usage.devices(trace):
        lines += _of_look(step, device.device, look, trace, terminal)
    return "\n".join(line.rstrip() for line in lines)


def _device(history: Steps, text: str) -> DeviceHistory:
    """The device whose allocator said so; of several accelerators, the fullest."""
    cpu = [one for one in history.devices if one.device == "cpu"]
    others = [one for one in history.devices if one.device != "cpu"]
    if cpu and ("CPUAllocator" in text or not others):
        return cpu[0]
    return max(others, key=lambda one: one.now)


def _totals(history: Steps, device: DeviceHistory, look: Look) -> Iterator[str]:
    (rows,) = [rows for name, rows in history.totals.by_device() if name == device.device]
    last = rows[-1]
    text = f"{device.device}: {size_text(int(last['now']))} alive as step {history.step_count - 1:,} ended"
    text += f", {size_text(int(last['highest_peak']))} at its peak"
    if last["reserved_peak"]:
        text += f", {size_text(int(last['reserved_peak']))} reserved"
    yield text
    before = rows[rows["step"] < look.step + max(look.steps, 1)]
    if len(before) and len(before) < len(rows):
        grown = int(last["now"]) - int(before[-1]["now"])
        than = "more" if grown >= 0 else "less"
        yield f"that is {size_text(abs(grown))} {than} than as the last look ended"


def _of_look(step: int, device: str, look: Look, trace: Trace, terminal: Terminal) -> Iterator[str]:
    peak = usage.peak(trace, device)
    yield from terminal.paragraph(
        SEEN,
        f"step {look.step:,} was looked at: it had {size_text(peak.bytes)} at its peak, as below",
    )
    yield from terminal.paragraph(INFERRED, f"step {step:,} held the same, but for what has grown:")
    yield ""
    yield from category_lines(peak, terminal)
    yield ""
    alive = usage.alive(trace, "peak", device)
    yield from largest_lines(postmortem.largest(trace, alive), terminal)
