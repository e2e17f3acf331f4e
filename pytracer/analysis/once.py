"""What is computed from a trace is computed once: a Trace never changes."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from pytracer.trace import Trace

Result = TypeVar("Result")


def once_per_trace(function: Callable[[Trace], Result]) -> Callable[[Trace], Result]:
    """Keeps the result beside the trace's own fields: it lives as long as the trace does."""
    key = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def kept(trace: Trace) -> Result:
        results: dict[str, Any] = vars(trace).setdefault("_results", {})
        if key not in results:
            results[key] = function(trace)
        return results[key]  # type: ignore[no-any-return]

    return kept
