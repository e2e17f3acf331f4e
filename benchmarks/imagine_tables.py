"""Makes the tables of docs/imagine.md from the results of benchmarks/imagine.py."""

import textwrap
from typing import Any

Document = dict[str, Any]
GIB, MIB = 1 << 30, 1 << 20
_FEW = 5  # programs with the same difference; more are counted
# The columns of the table of named models.
_WAYS = ["one card", "DDP", "FSDP2", "tensor parallel", "bf16", "bfloat16", "checkpointed"]
_EXACT = 5e-6  # what the tables show as +0.000%


def models(document: Document) -> str:
    """A row per program: the errors of an imagined run against the real one."""
    rows = [_row(name, ways) for name, ways in document["programs"].items()]
    heads = ["program", "peak measured", "requested", "reserved", "worst category", "without a GPU"]
    machine = document["machine"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * 3 + "---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    measured = (
        f"Measured on {machine['device']}, torch {machine['torch']}, cuDNN {machine['cudnn']}"
        f"{_with_transformers(machine.get('transformers'))}, {machine['date'][:10]}.{_apart(document)}"
    )
    return "\n".join([*lines, "", measured + _again(machine), *_beside(document)])


def _apart(document: Document) -> str:
    """The programs that were measured on other days than the rest."""
    days = {name: row["taken"] for name, row in document["programs"].items() if "taken" in row}
    return f" {'; '.join(days)}: {', '.join(sorted({*days.values()}))}." if days else ""


def _row(name: str, ways: Document) -> list[str]:
    real, imagined, alone = (ways.get(way, {}) for way in ("real", "imagined", "alone"))
    problem = next((one["problem"] for one in (real, imagined, alone) if "problem" in one), "")
    if "peak" not in real or "peak" not in imagined:
        first = problem.splitlines()[0].partition(": ")[2] if problem else "not run"
        why = textwrap.shorten(first, 110, placeholder=" ...")
        size = f"{real['requested'] / GIB:.2f} GiB" if "requested" in real else ""
        return [name, size, "", "", why.replace("|", "/"), ""]
    errors = _errors(real, imagined)
    category, off = _worst(real, imagined)
    same = (
        "not run" if "peak" not in alone else "equal" if _told(alone) == _told(imagined) else "no"
    )
    worst = f"{category} {off:.2%}" if off >= 5e-5 else "none"
    return [name, f"{real['requested'] / GIB:.2f} GiB", *errors, worst, same]


def _errors(real: Document, imagined: Document) -> list[str]:
    """The errors of the peak and of reserved bytes: one number, or what they are between."""
    cells = []
    for what in ("requested", "reserved"):
        low, high = (end / real[what] - 1 for end in imagined["between"][what])
        cell = f"{low:+.3%}"
        if high > low:
            holds = low <= _EXACT and high >= -_EXACT
            cell += f" to {high:+.1%}{'' if holds else ', outside'}"
        cells.append(cell)
    return cells


def _worst(real: Document, imagined: Document) -> tuple[str, float]:
    names = {*real["by_category"], *imagined["by_category"]}
    off = {
        name: abs(real["by_category"].get(name, 0) - imagined["by_category"].get(name, 0))
        / real["peak"]
        for name in names
    }
    worst = max(sorted(off), key=lambda name: off[name])
    return worst, off[worst]


def _told(found: Document) -> Document:
    return {key: value for key, value in found.items() if key not in ("seconds", "device")}


def ranks(document: Document) -> str:
    """The errors of imagined ranks against real ones. Ranks with the same errors share a row."""
    machine = document["machine"]
    lines = ["| program | ranks | peak measured | requested | reserved | worst category |"]
    lines.append("|---|---|---:|---:|---:|---|")
    for name, row in document["programs"].items():
        cells: dict[str, list[str]] = {}
        for rank in range(len(row["errors"])):
            cells.setdefault(_of_rank(row, rank), []).append(str(rank))
        lines += [f"| {name} | {', '.join(those)} | {text} |" for text, those in cells.items()]
    measured = f"Measured on {machine['device']}, torch {machine['torch']}, {machine['date'][:10]}."
    measured += _apart(document)
    return "\n".join([*lines, "", measured + _again(machine), *_beside(document)])


def _of_rank(row: Document, rank: int) -> str:
    errors, real = row["errors"][rank], row["real"][rank]
    if "problem" in errors:
        why = textwrap.shorten(str(errors["problem"]), 110, placeholder=" ...")
        return f" | | | {why.replace('|', '/')}"
    worst, off = max(errors["by_category"].items(), key=lambda one: abs(one[1]))
    category = f"{worst} {abs(off):.2%}" if abs(off) >= 5e-5 else "none"
    cells = [f"{real['requested'] / GIB:.2f} GiB", *_errors(real, row["imagined"][rank]), category]
    return " | ".join(cells)


def _again(machine: Document) -> str:
    """When the runs were imagined, if that was after they were measured."""
    again = machine.get("imagined_again")
    return f" Imagined with torch {again['torch']}, {again['date'][:10]}." if again else ""


def _beside(document: Document) -> list[str]:
    """A paragraph for each other torch: the programs whose requested bytes are not the same."""
    rows = document["programs"]
    versions = sorted({version for row in rows.values() for version in row.get("beside", ())})
    of_machine = document["machine"].get("beside", {})
    paragraphs = []
    for version in versions:
        title = version + _with_transformers(of_machine.get(version))
        paragraphs += ["", f"Imagined with torch {title}: {_compared(version, rows)}"]
    return paragraphs


def _with_transformers(release: str | None) -> str:
    return f", transformers {release}" if release else ""


def _compared(version: str, rows: Document) -> str:
    """How many programs take the same bytes with this torch, and how far off the others are."""
    same, problems = 0, []
    others: dict[int, list[str]] = {}  # by how many bytes
    for name, row in rows.items():
        first = row["imagined"] if isinstance(row["imagined"], list) else [row["imagined"]]
        pairs = list(zip(first, row.get("beside", {}).get(version, []), strict=False))
        if not pairs or any("problem" in one for one, _ in pairs):
            continue
        if problem := next((one["problem"] for _, one in pairs if "problem" in one), None):
            problems.append(f"{name} (not imagined: {textwrap.shorten(problem, 60)})")
            continue
        one, two = max(pairs, key=lambda pair: abs(pair[1]["requested"] / pair[0]["requested"] - 1))
        off = two["requested"] - one["requested"]
        same += off == 0
        if off:
            named = f"{name} {two['requested'] / one['requested'] - 1:+.2%}"
            others.setdefault(off, []).append(named)
    parts = [*problems]
    for off, names in others.items():
        many = f"{len(names)} programs, each {off / MIB:+,.2f} MiB"
        parts += [many] if len(names) > _FEW else names
    count = same + len(problems) + sum(map(len, others.values()))
    text = f"the same bytes in {same} of {count} programs."
    return f"{text} Not in: {'; '.join(parts)}." if parts else text


def scratch(document: Document) -> str:
    """How many of the measured calls of cuDNN stay inside the bounds of imagined runs."""
    machine = document["machine"]
    passes = within = 0
    worst = 0.0
    for row in document["convolutions"]:
        for way in ("of_forward", "of_input", "of_weight"):
            if way not in row:
                continue
            most = _bound(row, way)
            passes += 1
            within += row[way] <= most
            worst = max(worst, row[way] / most)
    layers = [row for row in document["recurrent"] if "saved" in row]
    exact = sum(_reserve(row) in row["saved"] for row in layers)
    return (
        f"Of {passes:,} measured passes of convolutions, {within:,} stay within the bound; the "
        f"largest takes {worst:.2f} times the bound. Of {len(layers)} measured recurrent layers, "
        f"the reserve of {exact} is what is imagined, to the byte. Measured on {machine['device']}, "
        f"torch {machine['torch']}, cuDNN {machine['cudnn']}, {machine['date'][:10]}."
    )


def claims(document: Document) -> str:
    """How often what cuDNN says without a card is what a card took."""
    lines = [
        "| passes | measured on | passes | exact | of these right | within the bounds |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for one in document["files"].values():
        where, title = one["measured"], one["title"]
        on = f"{where['device']}, torch {where['torch']}, {where['date'][:10]}"
        if "first" in one:
            lines.append(_claimed(f"{title}, as first asked", on, one["first"]))
            title = "the same, with the rules that they changed"
        lines.append(_claimed(title, on, one))
    return "\n".join(lines)


def _claimed(title: str, where: str, counts: Document) -> str:
    passes, exact = counts["passes"], counts["exact"]
    return (
        f"| {title} | {where} | {passes:,} | {exact:,} ({exact / passes:.0%}) | "
        f"{counts['exact_and_right']:,} | {counts['within']:,} |"
    )


def _bound(row: Document, way: str) -> int:
    import torch

    from pytracer.imagined import convolutions as bounds

    with torch.device("meta"):
        dtype = getattr(torch, row["dtype"])
        x, w = torch.empty(row["input"], dtype=dtype), torch.empty(row["weight"], dtype=dtype)
        ways = len(row["input"]) - 2
        moves = ([row[name]] * ways for name in ("stride", "padding", "dilation"))
        y = torch.ops.aten.convolution.default(
            x, w, None, *moves, row["transposed"], [0] * ways, row["groups"]
        )
    return bounds.of_pass(x, w, y).most


def layer_of(row: Document) -> Any:
    """The recurrent layer that a row has measured."""
    from pytracer.imagined import recurrent, recurrent_scratch

    return recurrent_scratch.Layer(
        mode=recurrent.LAYERS[row["kind"]],
        hidden=row["hidden"],
        layers=row["layers"],
        directions=2 if row["both"] else 1,
        rows=row["batch"] * row["length"],
        length=row["length"],
        batch=row["batch"],
        width=row["input"],
        item=4 if row["dtype"] == "float32" else 2,
        dropout=row["dropout"],
        is_bfloat16=row["dtype"] == "bfloat16",
    )


def _reserve(row: Document) -> int:
    from pytracer.imagined import recurrent_scratch

    return recurrent_scratch.kept_for_backward(layer_of(row))


def peers(document: Document) -> str:
    """What other estimators say of the same programs."""
    machine = document["machine"]
    titles = [title for title in next(iter(document["programs"].values())) if title != "measured"]
    lines = [
        f"| program | measured | {' | '.join(titles)} |",
        "|---|" + "---:|" * (len(titles) + 1),
    ]
    for name, row in document["programs"].items():
        cells = [
            f"{row[title] / row['measured'] - 1:+.1%}" if isinstance(row[title], int) else "stopped"
            for title in titles
        ]
        lines.append(f"| {name} | {row['measured'] / GIB:.2f} GiB | {' | '.join(cells)} |")
    note = f"Asked with torch {machine['torch']} on the CPU, {machine['date'][:10]}."
    return "\n".join([*lines, "", note])


def large(document: Document) -> str:
    """One sentence about the large model."""
    machine = document["machine"]
    return (
        f"{document['requested'] / GIB:,.0f} GiB, imagined in {document['seconds']:.0f} s with "
        f"{document['resident'] / GIB:.2f} GiB of resident memory, of which torch and transformers "
        f"are most. Measured on {machine['cores']} cores, torch {machine['torch']}, "
        f"{machine['date'][:10]}."
    )


def open_models(document: Document) -> str:
    """A row per model: what a rank holds in each way, and what imagining took."""
    rows: dict[str, dict[str, Document]] = {}
    for row in document["runs"]:
        rows.setdefault(row["model"], {})[row["way"]] = row
    ways = sorted({row["way"] for row in document["runs"]}, key=_WAYS.index)
    refused = {(name, way) for name, way in document["refused"]}
    heads = ["model", *ways, "seconds", "resident"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    lines += [
        f"| {' | '.join(_held(name, found, ways, refused))} |" for name, found in rows.items()
    ]
    machine = document["machine"]
    equal = sum(row["verdict"] == "equal" for row in document["runs"])
    note = (
        f"{equal} of {len(document['runs'])} runs of {len(rows)} models are equal to the byte. "
        f"Imagined on {machine['cores']} cores, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, {machine['date'][:10]}."
    )
    return "\n".join([*lines, "", note])


def _held(
    name: str, found: dict[str, Document], ways: list[str], refused: set[tuple[str, str]]
) -> list[str]:
    """The cells of one model. A dash is a way that torch or transformers refuse."""
    cells = []
    for way in ways:
        row = found.get(way)
        if row is None:
            cells.append("-" if (name, way) in refused else "")
        elif row["verdict"] != "equal":
            cells.append("wrong")
        else:
            held = row["weights"] + row["gradients"] + row["optimizer_state"]
            cells.append(f"{held / GIB:.2f}")
    took = [row for row in found.values() if "seconds" in row]
    if not took:
        return [name, *cells, "", ""]
    seconds = sorted(row["seconds"] for row in took)
    return [
        name,
        *cells,
        f"{seconds[0]:.0f} to {seconds[-1]:.0f}",
        f"{max(row['resident'] for row in took) / GIB:.2f} GiB",
    ]
