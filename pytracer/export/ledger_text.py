"""The ledger as text: a line per row, and notes below."""

from collections.abc import Mapping
from typing import Any

from pytracer.analysis.allocator.fragmentation import Layout
from pytracer.analysis.allocator.ledger import Ledger, Row
from pytracer.analysis.facts import devices
from pytracer.basics.units import size_text
from pytracer.export.terminal import GREEN, PLAIN, YELLOW, Terminal


def render(ledger: Ledger, layout: Layout | None = None, terminal: Terminal = PLAIN) -> str:
    """The ledger, and below it the memory that the allocator holds and cannot use."""
    longest = max(len(_title(row)) for row in ledger.rows)
    lines = [_line(row, longest, terminal) for row in ledger.rows]
    lines += ["", *_verdict(ledger, terminal)]
    if layout is not None:
        lines += terminal.paragraph("cache", _cache_text(layout))
    for note in ledger.notes:
        lines += terminal.paragraph("note", note)
    return "\n".join(line.rstrip() for line in lines)


def render_now(gpus: Mapping[str, Mapping[str, Any]]) -> str:
    """The devices as NVML shows them now, with the memory of each process."""
    lines = []
    for uuid, gpu in gpus.items():
        if not gpu:
            lines.append(f"{uuid}: NVML has no figures for it")
            continue
        used, total = size_text(gpu["used"]), size_text(gpu["total"])
        lines.append(f"{uuid}: {used} of {total} in use")
        reserve, processes = gpu["driver_reserve"], gpu["processes"]
        rest = gpu["used"] - (reserve or 0)
        if reserve is not None:
            lines.append(f"  {'driver reserve':<32}{size_text(reserve):>10}")
        for process in processes or ():
            name = f"process {process['pid']} {process.get('name', '')}".rstrip()
            held = process["bytes"]
            rest -= held or 0
            size = "unknown" if held is None else size_text(held)
            lines.append(f"  {name:<32}{size:>10}")
        if processes is None:
            lines.append("  NVML does not list the processes that hold it")
        lines.append(f"  {'in no process listed here':<32}{size_text(rest):>10}")
    return "\n".join(lines) or "NVML shows no device"


def render_probe(probed: Mapping[str, Any]) -> str:
    """The memory that CUDA takes in a process that does nothing else."""
    loading = probed["module_loading"] or "default"
    lines = [f"A process of its own on {probed['device']} (CUDA_MODULE_LOADING: {loading}) holds"]
    texts = {
        "context": "with a bare context",
        "cublas": "and cuBLAS after a product",
        "cudnn": "and cuDNN after a convolution",
    }
    for stage in probed["stages"]:
        own = stage["process_bytes"]
        figure = "" if own is None else f"   ({size_text(own)} by its own figure)"
        size = size_text(stage["device_bytes"])
        lines.append(f"  {texts[stage['up_to']]:<32}{size:>10}{figure}")
    return "\n".join(lines)


def _title(row: Row) -> str:
    return "  " * row.level + row.name


def _line(row: Row, longest: int, terminal: Terminal) -> str:
    size = "not known" if row.bytes is None else size_text(row.bytes)
    how = row.known_by if row.moment == "end" else f"{row.known_by}, {_moment(row.moment)}"
    start = f"{_title(row):<{longest}}  {size:>10}  "
    if len(start + how) > terminal.width:  # the moment gives way: the notes tell of it
        how = row.known_by
    return start + how if len(start + how) <= terminal.width else start


def _moment(moment: str) -> str:
    texts = {"step": "after a step", "call": "between calls", "begin": "at the start"}
    return texts.get(moment, f"at the {moment}")


def _verdict(ledger: Ledger, terminal: Terminal) -> list[str]:
    text = verdict(ledger)
    if ledger.residual is None or ledger.limit is None:
        return terminal.paragraph("residual", text)
    lines = terminal.in_one_color("residual", text, GREEN if ledger.closes else YELLOW)
    reserve = next((row.bytes for row in ledger.rows if row.name == "driver's reserve"), None)
    if reserve is not None and ledger.total is not None:
        shown = f"nvidia-smi shows {(ledger.total - reserve) / 2**20:,.0f} MiB"
        lines += terminal.paragraph("device", f"{shown}: it leaves the driver's reserve out")
    return lines


def verdict(ledger: Ledger) -> str:
    """How much the rows leave unexplained, or why nobody knows."""
    if ledger.residual is not None and ledger.limit is not None:
        return f"{size_text(ledger.residual)} unexplained (tolerance {size_text(ledger.limit)})"
    if ledger.device == "cpu":
        asked = "the process's memory is not read"
    else:
        asked = "the driver is not asked"
    when = "at the peak" if ledger.at == "peak" else "at the end"
    return f"{asked} {when}, so there is no residual"


def _cache_text(layout: Layout) -> str:
    if layout.request is None:
        return f"{size_text(layout.free)}; nothing was requested from it"
    request = layout.request
    asked = "the request that failed" if layout.device_free is not None else "the largest request"
    text = (
        f"{asked}, {size_text(request.bytes)}, could use {size_text(layout.usable)} of "
        f"{size_text(layout.free)}; its largest gap is {size_text(layout.largest_gap)}. "
    )
    if layout.expandable:
        return text + "Segments are expandable already."
    if layout.usable or layout.unusable == 0:
        return text.rstrip()
    pages = f"whole free pages: {size_text(layout.free_pages)}"
    if layout.expandable_would_help:
        return text + (f"{devices.EXPANDABLE} would have gathered it from the gaps ({pages}).")
    return text + f"Expandable segments would not have gathered it from the gaps ({pages})."
