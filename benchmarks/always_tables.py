"""The tables of docs/always.md, from the results of always.py and always_price.py."""

from typing import Any

_MIB = 1 << 20


def proofs(found: dict[str, Any]) -> str:
    """A row for each proof that has run."""
    rows = [
        f"| {title} | {said(found[name])} |"
        for name, (title, said) in _ROWS.items()
        if name in found
    ]
    return "\n".join(["| on the CPU (`benchmarks/always.py`) | found |", "|---|---|", *rows])


def price(document: dict[str, Any]) -> str:
    """A row for each case: whose code the samples fell into, looks included."""
    machine = document["machine"]
    lines = [
        (
            f"| {machine['device']}, torch {machine['torch'].partition('+')[0]} | steps | looks | our code "
            "| thread | clock |"
        ),
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {case['case']} | {case['steps']['always']:,} | {len(case['looks'])} | {case['ours']:.2%} "
        f"| {case['thread_ratio']:.3f} | {case['wall_ratio']:.3f} |"
        for case in document["cases"]
    ]
    lines += [
        "",
        (
            f"`benchmarks/always_price.py`, {machine['date'][:10]}: the share of samples of the program's threads, "
            "and the step's"
        ),
        "processor time and time over the plain step's, which is noise of a shared host.",
    ]
    return "\n".join(lines)


def _million(found: dict[str, Any]) -> str:
    resident = found["resident_by_tenths"]
    return (
        f"{found['rows']:,} rows, {found['bytes_on_the_disk'] / 1e6:.0f} MB on the disk; resident "
        f"{resident[0] / _MIB:.0f} MiB at first and {resident[-1] / _MIB:.0f} MiB after nine tenths"
    )


_ROWS: dict[str, tuple[str, Any]] = {
    "instructions": (
        "Instructions that our code adds to a step, between looks",
        lambda found: f"{found['ours']:,}, of these {found['in_events']:,} in events",
    ),
    "equal": (
        "Totals and categories beside a full trace",
        lambda found: (
            f"{found['steps_equal']} of {found['steps']} steps and {found['looks_equal']} of "
            f"{found['looks']} looks are equal"
        ),
    ),
    "million": ("A million tiny steps", _million),
    "kills": (
        "Killed at random",
        lambda found: f"{found['runs']} times; steps lost at most: {found['steps_lost_at_most']}",
    ),
    "leak": (
        "64 KiB more in each step from 40,000 on, of 50,000",
        lambda found: (
            f"{found['alarms']} alarm, at step {found['alarm_at_step']:,}, with variable and line"
        ),
    ),
    "rare": (
        "A larger batch in each 10,000th of 20,000 steps",
        lambda found: (
            f"noted at step {', '.join(f'{step:,}' for step in found['noted_at'])}, with its peak"
        ),
    ),
    "healthy": (
        "Healthy programs of the hints' suite",
        lambda found: (
            f"{found['programs']}, run {found['runs']} times: "
            + ("no alarm" if found["proved"] else "an alarm")
        ),
    ),
}
