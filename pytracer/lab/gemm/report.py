"""The measurements as text: a table as wide as the screen, and a conclusion in words."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytracer.lab.gemm.advice import Advice, Dimension, called
from pytracer.lab.gemm.shapes import CrossEntropy, Gemm


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each product, in the given order."""
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


_HARDLY = 0.05  # of throughput: a smaller loss does not matter


def conclusions(groups: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each group and library: the worst size against the best."""
    lines = []
    for group in groups:
        bias = group["bias"]
        doubt = max(abs(bias["low"] - 1), abs(bias["high"] - 1)) if bias else 0.0
        for library in dict.fromkeys(row["library"] for row in group["rows"]):
            rows = [row for row in group["rows"] if row["library"] == library]
            title = f"{group['title']}, {library}" if library else group["title"]
            if len(rows) > 1:
                lines.append(f"{title}: {_conclusion(rows, doubt)}")
    return lines


def _conclusion(rows: Sequence[dict[str, Any]], doubt: float) -> str:
    """Compares the times per FLOP, so that a larger size is not worse for its size."""
    best, worst = (pick(rows, key=lambda row: row["tflops"]) for pick in (max, min))
    times = best["tflops"] / worst["tflops"]
    if times - 1 <= max(_HARDLY, doubt):
        off = ", and the measurement may be off by as much" if times - 1 > _HARDLY else ""
        return f"all within {times - 1:.0%} of the best per FLOP{off}"
    varied = [name for name in ("m", "n", "k") if len({row[name] for row in rows}) > 1]
    text = (
        f"worst {_place(worst, varied)}, {times:.1f} times as long per FLOP as the best, "
        f"{_place(best, varied)}"
    )
    enough = _enough(rows, varied[0]) if len(varied) == 1 else ""
    return f"{text}; {enough}" if enough else text


def _place(row: dict[str, Any], varied: Sequence[str]) -> str:
    return "x".join(str(row[name]) for name in varied)


def _enough(rows: Sequence[dict[str, Any]], dimension: str) -> str:
    """The least alignment in elements with which no size loses enough to pad for."""
    best = max(row["tflops"] for row in rows)
    for unit in sorted({row[dimension] & -row[dimension] for row in rows}):
        aligned = [row["tflops"] for row in rows if row[dimension] % unit == 0]
        if len(aligned) > 1 and (times := best / min(aligned)) - 1 <= _HARDLY:
            return f"multiples of {unit} within {times - 1:.0%}"
    return ""


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
    """The advice: the sizes to pad and the gains, or that no padding gains anything."""
    model = advice.model
    lines = [f"{model.name} in {model.dtype}: {_sizes(model.sizes)}", ""]
    lines += _products(advice)
    lines.append("")
    if not advice.dimensions:
        lines.append("Nothing to pad: every size is a multiple of 128 bytes already.")
    for dimension in advice.dimensions:
        lines += [*_dimension(advice, dimension), ""]
    if any(dimension.candidates for dimension in advice.dimensions):
        lines += [_BRACKETS]
    lines += [f"Note: {note}" for note in model.notes]
    return "\n".join(lines).rstrip()


_BRACKETS = (
    "In brackets: the 95 % interval of the gain; and the bias, which is the difference between two "
    "timings of the same product."
)


def _sizes(sizes: Mapping[str, int]) -> str:
    """The sizes of a model. The sizes of a trace have no names."""
    named = [f"{name} {value}" for name, value in sizes.items() if name != str(value)]
    others = [str(value) for name, value in sizes.items() if name == str(value)]
    return ", ".join([*named, *([f"sizes {', '.join(others)}"] if others else [])])


def _products(advice: Advice, most: int = 8) -> Iterable[str]:
    yield (
        f"{'lost':>9}{'a step':>10}{'TFLOP/s':>9}{'times':>6}  product "
        f"(lost: against {_number(advice.best_tflops)} TFLOP/s, the best here)"
    )
    for use, timing in advice.products[:most]:
        lost = f"{_number(advice.lost(use, timing) * 1e3)} ms" if use.work.flops else "-"
        rate = _number(timing.tflops) if use.work.flops else "-"
        spent = f"{_number(use.count * timing.time.median * 1e3)} ms"
        layer = "" if isinstance(use.work, CrossEntropy) else f"{use.layer}: "
        kernel = advice.kernels.get(timing.work) if isinstance(timing.work, Gemm) else None
        by = f", an {kernel.generation} kernel" if kernel and kernel.arch else ""
        yield f"{lost:>9}{spent:>10}{rate:>9}{use.count:>6}  {layer}{timing.work}{by}"
    rest = len(advice.products) - most
    more = f", {rest} more not shown" if rest > 0 else ""
    yield f"{'':9}{_number(advice.seconds * 1e3) + ' ms':>10}  in all{more}"


def _dimension(advice: Advice, dimension: Dimension) -> Iterable[str]:
    yield dimension.reason
    step = advice.model.step_seconds
    for one in dimension.candidates:
        gain = one.gain
        word, sign = ("saves", 1e3) if gain.median >= 0 else ("costs", -1e3)
        low, high = sorted((gain.low * sign, gain.high * sign))
        saved = f"{word} {_number(gain.median * sign)} ms a step"
        bias = f"{'within the bias of' if one.within_doubt else 'bias'} up to"
        between = f"({_number(low)} to {_number(high)}, {bias} {_number(one.doubt * 1e3)})"
        share = f", {abs(gain.median) / step:.1%} of the step" if step else ""
        memory = sum(one.added_bytes.values()) / 2**20
        verdict = "faster" if one.faster else "not proven faster"
        mark = "->" if dimension.advised and dimension.advised.value == one.value else "  "
        yield f"{mark} {one.value:>7}  {verdict:<17} {saved} {between}{share}; +{_number(memory)} MiB"
    for size, why in dimension.refused.items():
        yield f"   {size:>7}  not measured: {why}"
    if dimension.advised:
        parts = ", ".join(
            f"{name} {size / 2**20:.1f} MiB" for name, size in dimension.advised.added_bytes.items()
        )
        yield f"   {called(dimension.name, dimension.value)} -> {dimension.advised.value} costs {parts}"


def peak_text(dtype: str, row: dict[str, Any], sustained: dict[str, Any]) -> str:
    """The best of one dtype on one line: after a rest, and sustained."""
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
    """The range of the clock, or the reason why it is unknown."""
    if gauges is None:
        return "; ".join(dict.fromkeys(notes))
    clock = gauges["sm_mhz"]
    held = f", held down by {', '.join(gauges['held_by'])}" if gauges["held_by"] else ""
    return (
        f"clock {clock['least']} to {clock['most']} MHz (median {clock['median']}), "
        f"up to {gauges['most_watts']:.0f} W and {gauges['most_celsius']} C{held}"
    )


def _number(value: float) -> str:
    """A number with about three digits."""
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.0995 else 3}f}"
