"""The tables of docs/prediction.md, from what benchmarks/prediction.py left."""

from typing import Any

Document = dict[str, Any]
PEAK = "reserved_bytes.all.peak"


def replay(document: Document) -> str:
    """A row per program: how many of its runs reserved what was predicted, and the proofs."""
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


def _off(run: Document) -> float:
    measured: int = run["measured"][PEAK]
    return abs(run["predicted"][PEAK] - measured) / measured


def _proved(runs: list[Document]) -> str:
    """Smallest limits at which nothing failed, and 2 MiB below which something did."""
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
    """A row per plan: how far the prediction was off."""
    rows = []
    for run in document["runs"]:
        measured, predicted = run["measured"], run["predicted"]
        if "problem" in measured:
            continue
        cells = [run["model"], str(len(run["modules"]))]
        cells.append(f"{measured['peak'] / run['base']['peak']:.0%}")
        for name in ("peak", "reserved", "step_s"):
            known = measured.get(name) and predicted.get(name)
            cells.append(f"{predicted[name] / measured[name] - 1:+.3%}" if known else "")
        rows.append(cells)
    heads = ["model", "modules checkpointed", "peak, of that without", "error of the peak"]
    heads += ["of what is reserved", "of the step's time"]
    return "\n".join([_table(heads, rows), "", _machine(document)])


def what_if(document: Document) -> str:
    """A row per architecture: where the interval lies about what was measured."""
    rows = []
    for run in document["runs"]:
        if "problem" in run:
            rows.append([run["model"], "not predicted", ""])
            continue
        low, high = (run[name] / run["measured"] - 1 for name in ("lowest", "highest"))
        error = f"{low:+.3%}" if low == high else f"{low:+.1%} to {high:+.1%}"
        rows.append([run["model"], error, f"{run['with_law']:.1%}"])
    heads = ["architecture", "predicted, of what was measured", "bytes with a law"]
    return "\n".join([_table(heads, rows), "", _machine(document)])


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _machine(document: Document) -> str:
    cudnn = f", cuDNN {document['cudnn']}" if document.get("cudnn") else ""
    return (
        f"Measured on {document['device']}, torch {document['torch']}{cudnn}, {document['date']}."
    )
