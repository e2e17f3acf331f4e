"""What a plan changes of a program that nobody edits: `pytracer run --apply` makes these changes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPTIMIZERS = ("fused", "foreach", "8bit", "loop")


def allocator_variables(settings: str) -> dict[str, str]:
    """The variables that give each release of torch these settings of CUDA's allocator."""
    return {"PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}


@dataclass(frozen=True)
class Changes:
    """What `pytracer run --apply` changes, and nothing else of the program."""

    settings: str = ""  # of CUDA's allocator
    checkpoint: tuple[str, ...] = ()  # modules
    offload: tuple[str, ...] = ()  # modules
    optimizer: str = ""  # how it steps, one of OPTIMIZERS; "" as the program says
    set_to_none: bool = False  # what zero_grad() does with gradients
    bucket_views: bool = False  # gradient_as_bucket_view of DistributedDataParallel
    micro_batches: int = 0  # of each batch of transformers' Trainer; 0 as the program says
    bf16: bool = False  # the outermost modules run under autocast
    lora: int = 0  # the rank of adapters that are trained instead of the weights; 0: none

    def __bool__(self) -> bool:
        """Whether anything changes."""
        return self != Changes()

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which torch starts."""
        return allocator_variables(self.settings) if self.settings else {}

    @property
    def is_bit_equal(self) -> bool:
        """Whether the program computes the same bits."""
        changed = (self.optimizer, self.set_to_none, self.bucket_views, self.micro_batches)
        return not any((*changed, self.changes_numbers))

    @property
    def changes_numbers(self) -> bool:
        """Whether the program trains with fewer bits or weights, and not only rounds differently."""
        return self.bf16 or bool(self.lora) or self.optimizer == "8bit"

    @property
    def bits(self) -> str:
        """What becomes of the numbers: equal, rounded or changed."""
        if self.changes_numbers:
            return "changed"
        return "equal" if self.is_bit_equal else "rounded"


def changes_of(values: Mapping[str, Any]) -> Changes:
    """The changes from JSON, whose lists are tuples."""
    read: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Changes(**read)
