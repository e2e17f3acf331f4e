"""A DataLoader of an imagined run loads in the run's own process."""

import inspect
from typing import Any

import torch.utils.data

_make = torch.utils.data.DataLoader.__init__
_OF_WORKERS = {
    "num_workers": 0,
    "pin_memory": False,
    "timeout": 0,
    "multiprocessing_context": None,
    "prefetch_factor": None,
    "persistent_workers": False,
}


def loads_here(self: Any, *args: Any, **kwargs: Any) -> None:
    """Makes a loader without workers, because a fake tensor cannot go to another process."""
    given = inspect.signature(_make).bind(self, *args, **kwargs)
    given.arguments.update(_OF_WORKERS)
    _make(*given.args, **given.kwargs)
