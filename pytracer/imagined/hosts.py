"""What torch answers on an imagined host: the state of its generator is a tensor there."""

from typing import Any

import torch

from pytracer.basics.private_torch import FakeTensor


def random_state() -> dict[str, Any]:
    """Replacements of functions of `torch.random`: a state has its bytes, as checkpoints keep it."""
    size = torch.get_rng_state().nbytes
    restore = torch.set_rng_state

    def get() -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def set_(state: torch.Tensor) -> None:
        if not isinstance(state, FakeTensor):
            restore(state)

    return {"get_rng_state": get, "set_rng_state": set_}
