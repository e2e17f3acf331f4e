"""Makes the tables of README.md and docs/cost.md from the results of benchmarks/cost.py."""

from typing import Any

Document = dict[str, Any]

CLASSES = ("contraction", "normalisation", "element-wise")
PHASES = ("forward", "backward", "optimizer")


def summary(document: Document) -> str:
    """The claims in numbers, and each model's classes beside the published ones."""
    found = document["summary"]
    median = _number(found["median_time_ratio"])
    explained = len(found["outliers"]) - len(found["outliers_unexplained"])
    judged = [each["verdict"] for each in document.get("operators", ()) if each.get("verdict")]
    lines = [
        (
            f"- {found['flop_ratio_is_2']} of {found['shapes']} linear and convolution shapes do exactly "
            f"twice the FLOPs in backward, and {found['flop_ratio_is_1']} of {found['first_layers']} "
            f"first layers exactly once. The median takes {median} times as long. "
            f"{len(found['outliers'])} shapes take another time; {explained} of them are explained."
        ),
        (
            f"- {judged.count('confirmed')} of {len(judged)} operators that are bound by bandwidth take "
            "as many times as long in backward as they move bytes, within 10 % or 0.15."
        ),
        "",
        *_rows(["share of time", *CLASSES, "backward by forward"], _model_rows(document)),
        "",
        machine(document),
    ]
    return "\n".join(lines)


def _model_rows(document: Document) -> list[list[str]]:
    rows = []
    for model in document.get("models", ()):
        if not rows:
            published = model["published"]
            rows.append(
                ["BERT-large on a V100, published"]
                + [f"{published[name]['time']:.1f} %" for name in CLASSES]
                + ["-"]
            )
        both = model["classes"]["both"]
        shares = [f"{both[name]['time']:.1f} %" for name in CLASSES]
        rows.append([model["id"], *shares, _number(model["whole_ratio"])])
    return rows


def shapes(document: Document) -> str:
    """Every shape: FLOPs, time, the same of its products alone, the verdict."""
    heads = ["shape", "FLOPs", "time", "expected", "alone, TFLOP/s", "verdict"]
    rows = []
    for each in document.get("shapes", ()):
        alone = each.get("alone", {})
        ways = ("forward", "input_gradient", "weight_gradient")
        rates = " / ".join(f"{alone[f'{way}_tflops']:.0f}" for way in ways) if alone else "-"
        rows.append(
            [
                each["id"],
                _number(each.get("flop_ratio")),
                _number(each.get("time_ratio")),
                _number(each.get("expected_ratio")),
                rates,
                _verdict(each),
            ]
        )
    return _table(document, heads, rows)


def _verdict(each: Document) -> str:
    verdict = each.get("verdict", "")
    if verdict == "off" and each.get("as_alone"):
        return "explained: its products take that long alone"
    return f"{verdict}: {each['cause']}" if each.get("cause") else verdict or "-"


def operators(document: Document) -> str:
    """The operators bound by bandwidth: their ratios, and how near they come to a copy."""
    copy = "of the copy's bandwidth"
    heads = ["operator", "expected", "bytes here", "time", copy, "verdict", "below 75 %"]
    rows = []
    for each in document.get("operators", ()):
        shares = [each[way].get("of_copy") for way in ("forward", "backward")]
        texts = ["-" if share is None else f"{share:.0%}" for share in shares]
        below = [
            f"{way}: {each[way]['below_because'] or 'not explained'}"
            for way in ("forward", "backward")
            if "below_because" in each[way]
        ]
        expected = _number(each["expected"])
        # One digit more: two digits could round a value just outside to one inside.
        ratio = _number(each.get("time_ratio"), 3)
        moved = _number(each.get("expected_ratio"))
        cells = [each["operator"], expected, moved, ratio, " / ".join(texts), _verdict(each)]
        rows.append([*cells, "; ".join(below)])
    return _table(document, heads, rows)


def models(document: Document) -> str:
    """Each model's classes by FLOPs and time: forward, backward and both; and how sums agree."""
    heads = ["model", "phase", *(f"{name}, FLOPs / time" for name in CLASSES), "ratio"]
    rows = []
    for model in document.get("models", ()):
        for phase in ("forward", "backward", "both"):
            of_phase = model["classes"][phase]
            shares = [
                f"{of_phase[name]['flops']:.2f} / {of_phase[name]['time']:.1f} %"
                for name in CLASSES
            ]
            ratio = _number(model["whole_ratio"]) if phase == "both" else ""
            rows.append([model["id"], phase, *shares, ratio])
    sums = ", ".join(
        f"{model['id']} {model['profiler']['ratio']:.4f}" for model in document.get("models", ())
    )
    text = _table(document, heads, rows)
    return f"{text}\n\nSums by torch.profiler's: {sums}."


def phases(document: Document) -> str:
    """The phases of a step, measured in three ways."""
    heads = ["GPT-2, milliseconds", *PHASES]
    titles = {
        "by_hand_ms": "events put there by hand, nobody traces",
        "traced_ms": "`t.steps()`",
        "with_cost_ms": "`t.steps()` with `cost=True`",
        "kernels_ms": "sum of its kernels",
    }
    rows = [
        [title, *(f"{each[key][phase]:.2f}" for phase in PHASES)]
        for each in document.get("phases", ())
        for key, title in titles.items()
    ]
    return _table(document, heads, rows)


def machine(document: Document) -> str:
    """The machine of the measurement."""
    facts = document["machine"]
    copy = facts["peaks"]["copy_bytes_per_s"] / 1e12
    return (
        f"Measured on {facts['device']} (copy {copy:.2f} TB/s), torch {facts['torch']}, "
        f"{facts['date'][:10]}."
    )


def _table(document: Document, heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join([*_rows(heads, rows), "", machine(document)])


def _rows(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---|" * (len(heads) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _number(value: Any, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
