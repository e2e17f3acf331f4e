"""Makes the tables of docs/prediction.md from the results of benchmarks/prediction.py."""

from typing import Any

Document = dict[str, Any]
PEAK = "reserved_bytes.all.peak"


def replay(document: Document) -> str:
    """A row per program: how many runs reserved the predicted bytes, and the proofs."""
    rows = []
    for program in dict.fromkeys(run["program"] for run in document["runs"]):
        mine = [run for run in document["runs"] if run["program"] == program]
        cases = [run for run in mine if run["shows"] != "below it"]
        done = [run for run in cases if "problem" not in run["measured"]]
        exact = sum(run["predicted"][PEAK] == run["measured"][PEAK] for run in done)
        worst = max((_off(run) for run in done), default=0.0)
        again = sum(
            run["predicted"]["num_alloc_retries"] == run["measured"]["num_alloc_retries"]
            for run in done
        )
        cells = [program, f"{exact} of {len(cases)}", f"{worst:.2%}", f"{again} of {len(cases)}"]
        rows.append([*cells, _proved(mine)])
    heads = ["program", "peak reserved to the byte", "largest error", "retries", "limits proved"]
    return "\n".join([_table(heads, rows), "", *_problems(document), _machine(document)])


def replays(document: Document) -> str:
    """How many traces, at their own settings, reserve the measured bytes when replayed."""
    rows, machine = document["programs"], document["machine"]
    off = {
        name: row["replayed"] / row["reserved"] - 1
        for name, row in rows.items()
        if row["replayed"] != row["reserved"]
    }
    text = (
        f"At its own settings, the replay of a trace reserves to the byte what torch reserved in "
        f"{len(rows) - len(off)} of {len(rows)} programs"
    )
    others = "; ".join(f"{name} {share:+.2%}" for name, share in off.items())
    text += f". The others: {others}." if off else "."
    return (
        f"{text} Measured on {machine['device']}, torch {machine['torch']}, {machine['date'][:10]}."
    )


def fitted(document: Document) -> str:
    """A row per program: what was promised of the plan, and what was measured under it."""
    rows, count = [], {"ran": 0, "peak": 0, "time": 0, "equal": 0}
    planned = [row for row in document["programs"] if row.get("fits") and "problem" not in row]
    left = [row["name"] for row in planned if "measured" not in row]
    for row in document["programs"]:
        if row["name"] in left:
            continue
        found, promised = row.get("measured", {}), row.get("promised")
        if "fitted" not in found or not found.get("limited", {}).get("failed"):
            why = row.get("problem") or found.get("problem") or _not_measured(row)
            rows.append([row["name"], why, *["-"] * 5])
            continue
        plain, fitted = found["plain"], found["fitted"]
        if fitted["failed"]:
            rows.append([row["name"], _changed(row), f"**{fitted['failed']}**", *["-"] * 4])
            continue
        peak = fitted["peak"] / promised["peak"] - 1
        is_timed = fitted.get("step_s") and plain.get("step_s")
        ratio = fitted["step_s"] / plain["step_s"] if is_timed else 0.0
        count["ran"] += 1
        count["peak"] += abs(peak) <= 0.01
        count["time"] += promised["time"] / 1.1 <= ratio <= promised["time_at_most"] * 1.1
        count["equal"] += bool(found["equal"])
        saved = 1 - fitted["reserved"] / plain["reserved"]
        least, most = (f"{promised[name]:.2f}" for name in ("time", "time_at_most"))
        words = least if least == most else f"{least} to {most}"
        words += " or more" * promised.get("flushes", False)
        times = [words, f"{ratio:.2f}" if is_timed else "-"]
        bits = {True: "equal", False: "differ", None: "not known"}[found["equal"]]
        rows.append([row["name"], _changed(row), f"-{saved:.0%}", f"{peak:+.2%}", *times, bits])
    machine = document["machine"]
    titles = ("program", "plan", "reserved", "peak, measured over promised", "time promised")
    text = _table([*titles, "measured", "losses"], rows)
    return (
        f"Each program had {document['share']:.0%} of what it reserves, with which it fails as it is. "
        f"Under its plan, {count['ran']} of {len(rows)} ran: {count['peak']} with the promised peak within "
        f"1 %, {count['time']} in a time within 10 % of the promised, {count['equal']} with equal losses.\n\n"
        f"{text}\n\nMeasured on {machine['device']}, torch {machine['torch']}, {machine['date']}. "
        f'"Not known": two plain runs differ, or there was only one.'
        + (f" A plan was found, and not run yet: {'; '.join(left)}." if left else "")
    )


def _not_measured(row: dict[str, Any]) -> str:
    if not row.get("fits", True):
        return "nothing fits"
    if "limited" not in row.get("measured", {}):
        return "did not end"
    return "the plain program did not fail"


def _changed(row: dict[str, Any]) -> str:
    changes = row["changes"]
    parts = [f"{len(changes['checkpoint'])} checkpoints"] if changes["checkpoint"] else []
    parts += [changes["settings"]] if changes["settings"] else []
    return ", ".join(
        [*parts, *([f"{changes['optimizer']} optimizer"] if changes["optimizer"] else [])]
    )


def advice(*documents: Document) -> str:
    """A row per change that was made: what a replay said, and what the changed program saved."""
    parts = []
    for document in documents:
        rows = [
            [
                row["program"],
                row["kind"],
                _short(row["change"]),
                *(f"{row[name] / (1 << 20):,.2f} MiB" for name in ("saves", "measured")),
                f"{(row['saves'] - row['measured']) / row['peak']:+.2%}",
            ]
            for row in document["rows"]
            if row.get("measured") is not None
        ]
        heads = ["program", "kind", "change", "said to save", "saved", "of the peak"]
        where = f"Measured on {document['machine']}, torch {document['torch']}, {document['date']}."
        parts.append("\n".join([_table(heads, rows), "", where]))
    return "\n\n".join(parts)


def _short(text: str) -> str:
    """The sentence up to its reasons."""
    first = text.partition(":")[0].partition(", made at")[0]
    return first.replace("|", "/")


def _off(run: Document) -> float:
    measured: int = run["measured"][PEAK]
    return abs(run["predicted"][PEAK] - measured) / measured


def _proved(runs: list[Document]) -> str:
    """Counts the smallest limits at which nothing failed, but 2 MiB below something did."""
    at = [run for run in runs if run["shows"] == "smallest limit"]
    below = [run for run in runs if run["shows"] == "below it"]
    kept = [not run["measured"].get("num_ooms", 1) for run in at]
    failed = [run["measured"].get("num_ooms", 0) > 0 for run in below]
    return f"{sum(a and b for a, b in zip(kept, failed, strict=True))} of {len(at)}"


def _problems(document: Document) -> list[str]:
    found = []
    for run in document["runs"]:
        if "problem" in run["measured"]:
            what = f"{run['program']} under `{run['settings']}`"
            found.append(f"{what} ended in an error of CUDA's, and counts as not predicted.")
    caught = {
        run["program"]
        for run in document["runs"]
        if run["shows"] == "below it"
        and run["measured"].get("num_ooms")
        and not run["measured"].get("ended", True)
    }
    if caught:
        found.append(
            f"Below its smallest limit {', '.join(sorted(caught))} went on all the same: requests "
            "failed, and a library caught that and took slower kernels."
        )
    return [*found, ""] if found else []


def plans(document: Document) -> str:
    """A row per plan: whether it ran in its budget, and how far the prediction was off."""
    rows = []
    for run in document["runs"]:
        measured, predicted = run["measured"], run["predicted"]
        if "problem" in measured:
            continue
        what = [f"{len(run['modules'])} checkpointed"] if run["modules"] else []
        what += [f"{len(run['offloaded'])} offloaded"] if run.get("offloaded") else []
        cells = [run["model"], ", ".join(what) or "nothing"]
        ran = "failed" if measured.get("failed") else "ran"
        cells.append(f"{run['budget'] / 2**20:,.0f} MiB" if "budget" in run else "")
        cells.append(ran if "budget" in run else "")
        for name in ("peak", "reserved", "time_ratio"):
            known = measured.get(name) and predicted.get(name)
            cells.append(f"{predicted[name] / measured[name] - 1:+.3%}" if known else "")
        by_costs, took = predicted.get("time_ratio_from_costs"), measured.get("time_ratio")
        cells.append(f"{by_costs / took - 1:+.3%}" if by_costs and took else "")
        rows.append(cells)
    heads = ["model", "modules", "budget", "in it", "error of the peak", "of what is reserved"]
    heads += ["of the step's time", "by costs"]
    return "\n".join([_table(heads, rows), "", _machine(document)])


def planners(document: Document) -> str:
    """A row per planner and budget: the promised bytes and the needed ones."""
    rows = []
    for run in document["runs"]:
        asked = run["asked"]
        if asked is None:
            question = "the model as it is"
        elif asked > 1:
            question = f"{asked / 2**20:.1f} MiB"
        else:
            question = f"share {asked}"
        if "problem" in run:
            rows.append([run["model"], run["planner"], question, "no answer", "", ""])
            continue
        said, measured = run["said"], run["measured"]
        promise = f"{said / 2**20:.1f} MiB" if said else "nothing"
        error = f"{said / measured - 1:+.2%}" if said else ""
        rows.append(
            [run["model"], run["planner"], question, promise, f"{measured / 2**20:.1f} MiB", error]
        )
    heads = ["model", "planner", "asked for", "promised peak", "measured peak", "error"]
    return "\n".join([_table(heads, rows), "", _machine(document)])


def what_if(*documents: Document) -> str:
    """A row per architecture: the prediction against the measured peak, on each machine.

    Documents without a basis are of another prediction.
    """
    documents = tuple(one for one in documents if any("basis" in run for run in one["runs"]))
    names = dict.fromkeys(run["model"] for document in documents for run in document["runs"])
    rows = [[name] for name in names]
    heads = ["architecture"]
    for document in documents:
        heads += [f"{document['device']}: basis", "error of the likely value", "bytes with a law"]
        runs = {run["model"]: run for run in document["runs"]}
        for row in rows:
            row += _what_if_cells(runs.get(row[0]))
    machines = [_machine(document) for document in documents]
    return "\n".join([_table(heads, rows), "", *machines])


def _what_if_cells(run: Document | None) -> list[str]:
    if run is None:
        return ["not run", "", ""]
    if "problem" in run:
        return ["not predicted", "", ""]
    holds = run["lowest"] <= run["measured"] <= run["highest"]
    basis = run["basis"] if holds else f"{run['basis']}, outside"
    likely = run["likely"]
    error = "none" if likely is None else f"{likely / run['measured'] - 1:+.3%}"
    return [basis, error, f"{run['with_law']:.1%}"]


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _machine(document: Document) -> str:
    cudnn = f", cuDNN {document['cudnn']}" if document.get("cudnn") else ""
    return (
        f"Measured on {document['device']}, torch {document['torch']}{cudnn}, {document['date']}."
    )
