"""What was measured, as text: one table a screen wide, and a verdict in words."""

from collections.abc import Iterable, Sequence
from typing import Any

from pytracer.gemm.advice import Advice, Dimension
from pytracer.gemm.shapes import CrossEntropy, Gemm


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Products as they were measured, in the order given."""
    named = any(row["library"] for row in rows)
    library = f" {'library':<8}" if named else ""
    head = f"{'m':>6}{'n':>7}{'k':>6}  {'dtype':<5} {'role':<8}{library}{'align':>12}{'us':>11}"
    lines = [f"{head}{'+-':>7}{'TFLOP/s':>9}{'of best':>8}  kernel".rstrip()]
    for row in rows:
        time = row["microseconds"]
        noise = (time["high"] - time["low"]) / 2 / time["median"]
        aligned = "/".join(str(size) for size in row["alignment_bytes"].values())
        share = f"{row['peak_share']:.0%}" if row["peak_share"] else "-"
        library = f" {row['library'] or '-':<8}" if named else ""
        lines.append(
            f"{row['m']:>6}{row['n']:>7}{row['k']:>6}  {row['dtype']:<5} {row['role']:<8}{library}"
            f"{aligned:>12}{_number(time['median']):>11}{noise:>7.1%}"
            f"{_number(row['tflops']):>9}{share:>8}  {_kernel(row)}".rstrip()
        )
    return "\n".join(lines)


def _kernel(row: dict[str, Any]) -> str:
    kernel = row["kernel"]
    if kernel is None:
        return ""
    words = [f"sm{kernel['arch']}" if kernel["arch"] else "", ""]
    if row["older_kernel"]:
        words[0] += " (older than the device)"
    if kernel["tile_m"] and kernel["tile_n"]:
        words[1] = f"{kernel['tile_m']}x{kernel['tile_n']}"
    tiles = row["tiling"]
    if tiles:
        words.append(f"{tiles['waves']} waves, {tiles['wave_efficiency']:.0%} full")
    return " ".join(word for word in words if word)


def advice_text(advice: Advice) -> str:
    """What to pad, and what it gains; or that there is nothing to gain."""
    model = advice.model
    sizes = ", ".join(
        str(value) if name == str(value) else f"{name} {value}"
        for name, value in model.sizes.items()
    )
    lines = [f"{model.name} in {model.dtype}: {sizes}", ""]
    lines += _products(advice)
    lines.append("")
    if not advice.dimensions:
        lines.append("Nothing to pad: every size is a multiple of 128 bytes already.")
    for found in advice.dimensions:
        lines += [*_dimension(advice, found), ""]
    lines += [f"Note: {note}" for note in model.notes]
    return "\n".join(lines).rstrip()


def _products(advice: Advice, most: int = 8) -> Iterable[str]:
    yield (
        f"{'lost':>9}{'a step':>10}{'TFLOP/s':>9}{'times':>6}  product "
        f"(lost: against {_number(advice.best_tflops)} TFLOP/s, the best here)"
    )
    for use, timing in advice.products[:most]:
        lost = f"{_number(advice.lost(use, timing) * 1e3)} ms" if use.work.flops else "-"
        rate = _number(timing.tflops) if use.work.flops else "-"
        spent = f"{_number(use.count * timing.time.median * 1e3)} ms"
        what = "" if isinstance(use.work, CrossEntropy) else f"{use.layer}: "
        kernel = advice.kernels.get(timing.work) if isinstance(timing.work, Gemm) else None
        by = f", an {kernel.generation} kernel" if kernel and kernel.arch else ""
        yield f"{lost:>9}{spent:>10}{rate:>9}{use.count:>6}  {what}{timing.work}{by}"
    rest = len(advice.products) - most
    more = f", {rest} more not shown" if rest > 0 else ""
    yield f"{'':9}{_number(advice.seconds * 1e3) + ' ms':>10}  in all{more}"


def _dimension(advice: Advice, found: Dimension) -> Iterable[str]:
    yield found.reason
    step = advice.model.step_seconds
    for one in found.candidates:
        gain = one.gain
        word, sign = ("saves", 1e3) if gain.median >= 0 else ("costs", -1e3)
        low, high = sorted((gain.low * sign, gain.high * sign))
        saved = f"{word} {_number(gain.median * sign)} ms a step"
        between = f"({_number(low)} to {_number(high)}, bias up to {_number(one.doubt * 1e3)})"
        share = f", {abs(gain.median) / step:.1%} of the step" if step else ""
        memory = sum(one.added_bytes.values()) / 2**20
        verdict = "faster" if one.faster else "not faster"
        mark = "->" if found.advised and found.advised.value == one.value else "  "
        yield f"{mark} {one.value:>7}  {verdict:<10} {saved} {between}{share}; +{_number(memory)} MiB"
    for size, why in found.refused.items():
        yield f"   {size:>7}  not measured: {why}"
    if found.advised:
        parts = ", ".join(
            f"{name} {size / 2**20:.1f} MiB" for name, size in found.advised.added_bytes.items()
        )
        yield f"   {_named(found)} -> {found.advised.value} costs {parts}"


def _named(found: Dimension) -> str:
    return found.name if found.name == str(found.value) else f"{found.name} {found.value}"


def peak_text(dtype: str, row: dict[str, Any], sustained: dict[str, Any]) -> str:
    """The best of one dtype on one line: for a moment, and round after round."""
    share = row["datasheet_share"]
    of = f", {share:.1%} of the datasheet" if share else ""
    time = row["microseconds"]
    noise = (time["high"] - time["low"]) / 2 / time["median"]
    return (
        f"{dtype:<5} {_number(row['tflops']):>6} TFLOP/s +-{noise:.1%}{of}; "
        f"{_number(sustained['tflops'])} sustained; {row['m']}x{row['n']}x{row['k']}"
        f"{' by ' + row['library'] if row['library'] else ''}"
    )


def gauges_text(gauges: dict[str, Any] | None, notes: Iterable[str]) -> str:
    """What the clock did, or why that is not known."""
    if gauges is None:
        return "; ".join(dict.fromkeys(notes))
    clock = gauges["sm_mhz"]
    held = f", held down by {', '.join(gauges['held_by'])}" if gauges["held_by"] else ""
    return (
        f"clock {clock['least']} to {clock['most']} MHz (median {clock['median']}), "
        f"up to {gauges['most_watts']:.0f} W and {gauges['most_celsius']} C{held}"
    )


def _number(value: float) -> str:
    """Three digits, as people read them."""
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.0995 else 3}f}"
