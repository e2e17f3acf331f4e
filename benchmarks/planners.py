"""Compares checkpoint plans with torch's own two planners, on the same models and budgets.

    python benchmarks/planners.py --out benchmarks/results      # on the CPU; needs pulp and pwlf

- `activation_memory_budget` of torch.compile's partitioner is a share of the activations kept
  without it. It promises no peak. Here it runs with eager kernels (`aot_eager_decomp_partition`).
- The SAC ILP of torch.distributed._tools chooses which activations of each module to keep. It gives
  an upper bound of the peak (of weights, gradients and activations). Its clock needs a GPU; here an
  operator's time follows from its FLOPs and bytes.

Each answer is run: three steps of SGD without momentum, recorded from before the model is made.
"""

import argparse
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import kept, prediction  # noqa: E402

BUDGETS = (0.6, 0.3)  # between the smallest plan's peak and that without a plan
SHARES = (0.6, 0.3, 0.1)  # activation_memory_budget
STEPS = 3


def run(name: str, change: Callable[[Any], Any]) -> Any:
    """Trains and records the model. `change` returns the function to call in its place."""
    import torch

    import pytracer

    torch._dynamo.reset()
    with pytracer.trace(devices="cpu", table=False) as recorded:
        model, _, loss = prediction.MODELS[name]("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        forward = change(model)
        for _ in range(STEPS):
            loss(forward).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorded


def same(model: Any) -> Any:
    """Returns the model as it is."""
    return model


# ---------------------------------------------------------------- torch.compile's partitioner


def compiled(share: float) -> Callable[[Any], Any]:
    """Returns a change that compiles the model with this activation_memory_budget."""

    def change(model: Any) -> Any:
        import torch
        from torch._functorch import config

        config.activation_memory_budget = share
        return torch.compile(model, backend="aot_eager_decomp_partition")

    return change


# ---------------------------------------------------------------- the SAC ILP


def by_size(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Returns an operator's time in ms, at 1e12 FLOPs and 1e11 bytes a second."""
    import torch
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    out = func(*args, **kwargs)
    packet = func._overloadpacket
    flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
    tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
    moved = sum(x.numel() * x.element_size() for x in tensors)
    return out, 1e3 * max(flops / 1e12, moved / 1e11)


def graph_of(name: str) -> tuple[Any, Any]:
    """Returns the ILP's input for the model by its own tools, and their facts of each module."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    stay = mock.patch.object(torch.nn.Module, "to", lambda module, *_: module)  # it stays
    with FakeTensorMode(allow_non_fake_inputs=True), stay:
        model, _, loss = prediction.MODELS[name]("cpu")
        memory, clock, sac = MemTracker(), RuntimeEstimator(), SACEstimator()
        memory.track_external(model)
        with memory:
            loss(model).backward()
            model.zero_grad()
        RuntimeEstimator._roofline_estimate = staticmethod(by_size)
        with clock("operator-level-cost-model"):
            loss(model).backward()
            model.zero_grad()
        with sac("operator-level-cost-model"):
            loss(model)
    stats = aggregate_stats(model, memory, clock, sac, torch.device("cpu"))
    return parse_module_info(stats), sac.sac_mod_stats


def selective(decisions: dict[str, list[int]]) -> Callable[[Any], Any]:
    """Puts each of these modules under a checkpoint that keeps what its decisions keep."""

    def change(model: Any) -> Any:
        from functools import partial

        from torch.utils.checkpoint import checkpoint

        for path, keep in decisions.items():
            module = model.get_submodule(path)
            module.forward = partial(
                checkpoint,
                module.forward,
                use_reentrant=False,
                context_fn=partial(contexts, keep),
            )
        return model

    return change


def contexts(keep: list[int]) -> Any:
    """Returns the checkpoint's contexts. They count operators as the estimator did."""
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    seen = {True: 0, False: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op in OPS_TO_ALWAYS_SKIP:
            return CheckpointPolicy.PREFER_RECOMPUTE
        at, seen[context.is_recompute] = seen[context.is_recompute], seen[context.is_recompute] + 1
        kept = at < len(keep) and keep[at]
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def by_ilp(name: str, budget: int | None) -> dict[str, Any]:
    """Returns the ILP's decisions and its peak; without a budget, its peak for the plain model."""
    from torch.distributed._tools.ilp_utils import get_peak_memory_runtime_baseline
    from torch.distributed._tools.sac_ilp import (
        get_optimal_checkpointing_policy_per_module as best,
        sac_milp,
    )

    graph, stats = graph_of(name)
    if budget is None:
        return {"peak": get_peak_memory_runtime_baseline(graph)[0], "decisions": {}}
    root = graph.nodes[0]["fqn"]
    decided, _, peak = sac_milp(graph, budget / 2**30)
    decisions = {
        path.removeprefix(f"{root}."): best(stats[path], 1 - min(share, 1.0))
        for path, share in decided.items()
        if path != root
    }
    return {"peak": peak, "decisions": decisions, "root": root in decided}


# ---------------------------------------------------------------- all of it


def rows_of(name: str) -> list[dict[str, Any]]:
    """Returns one row per planner and budget."""
    base = run(name, same)
    rows: list[dict[str, Any]] = []

    def add(planner: str, asked: Any, said: int | None, way: Callable[[Any], Any]) -> None:
        row = {"model": name, "planner": planner, "asked": asked, "base": base.peak.bytes}
        try:
            row |= {"said": said, "measured": run(name, way).peak.bytes}
        except Exception as error:  # an error of another tool is a result
            row["problem"] = f"{type(error).__name__}: {error}"[:200]
        rows.append(row)
        print(row, file=sys.stderr, flush=True)

    def ilp(budget: int | None) -> None:
        try:
            found = by_ilp(name, budget)
        except Exception as error:  # an error of another tool is a result
            problem = f"{type(error).__name__}: {error}"[:200]
            rows.append({"model": name, "planner": "SAC ILP", "asked": budget, "problem": problem})
            print(rows[-1], file=sys.stderr, flush=True)
            return
        said = found["peak"] if found["peak"] >= 0 else None
        add("SAC ILP", budget, said, selective(found["decisions"]))

    least = base.checkpoint_plan(1).chosen.peak
    ilp(None)
    for part in BUDGETS:
        budget = int(least + part * (base.peak.bytes - least))
        plan = base.checkpoint_plan(budget).chosen

        def change(model: Any, modules: Any = plan.modules) -> Any:
            prediction.changed(model, (list(modules), []))
            return model

        add("pytracer", budget, plan.peak, change)
        ilp(budget)
    for share in (1.0, *SHARES):
        add("activation_memory_budget", share, None, compiled(share))
    return rows


def main() -> int:
    """Runs every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--models", nargs="*", choices=prediction.MODELS)
    options = parser.parse_args()
    began = time.monotonic()
    rows = [row for name in options.models or prediction.MODELS for row in rows_of(name)]
    document = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        **prediction.machine("cpu"),
        "runs": rows,
        "seconds": round(time.monotonic() - began),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    where = options.out / "prediction-planners-cpu.json"
    kept.write(where, document)
    print(where, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
