"""Replaces the answers of `torch.cuda` for an imagined card. Scripts ask it before anything else."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytracer.imagined.adapter import replaced
from pytracer.imagined.cards import Card

Counters = Callable[[], dict[str, int]]


@contextlib.contextmanager
def described(card: Card, counters: Counters, trim: Callable[[], None]) -> Iterator[None]:
    """Answers every question about devices for the one card, until the block ends."""
    with contextlib.ExitStack() as stack:
        for owner, answers in (
            (torch.cuda, _cuda(card, counters, trim)),
            (torch.cuda.memory, _memory(card, counters, trim)),
            (torch.cuda.random, _random()),
            (torch.accelerator, _accelerator()),
        ):
            for name, answer in answers.items():
                if hasattr(owner, name):
                    stack.enter_context(replaced(owner, name, answer))
        yield


def _cuda(card: Card, counters: Counters, trim: Callable[[], None]) -> dict[str, Any]:
    properties = types.SimpleNamespace(
        name=card.title,
        major=card.capability[0],
        minor=card.capability[1],
        total_memory=card.capacity,
        multi_processor_count=card.processors,
        is_integrated=False,
        is_multi_gpu_board=False,
        warp_size=32,
        gcnArchName="",
    )
    nothing = _nothing
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": nothing,
        "_lazy_call": nothing,
        "init": nothing,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": nothing,
        "synchronize": nothing,
        "get_device_name": lambda device=None: card.title,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [f"sm_{card.capability[0]}{card.capability[1]}"],
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or card.has_bfloat16
        ),
        "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda device, peer: False,
        "device": _Device,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "set_stream": nothing,
        "ipc_collect": nothing,
        "utilization": lambda device=None: 0,
        **_memory(card, counters, trim),
        **_random(),
    }


def _memory(card: Card, counters: Counters, trim: Callable[[], None]) -> dict[str, Any]:
    def counted(name: str) -> Callable[..., int]:
        return lambda device=None: counters()[name]

    def stats(device: Any = None) -> dict[str, Any]:
        named = {}
        for name, amount in counters().items():
            quantity, which = name.split(".")
            named[f"{quantity}.all.{which}"] = amount
        return {**named, "num_alloc_retries": 0, "num_ooms": 0}

    def free_and_total(device: Any = None) -> tuple[int, int]:
        held = counters()["reserved_bytes.current"] + (card.beside or 0)
        return max(card.capacity - held, 0), card.capacity

    return {
        "memory_allocated": counted("allocated_bytes.current"),
        "max_memory_allocated": counted("allocated_bytes.peak"),
        "memory_reserved": counted("reserved_bytes.current"),
        "max_memory_reserved": counted("reserved_bytes.peak"),
        "memory_stats": stats,
        "mem_get_info": free_and_total,
        "empty_cache": lambda: trim(),
        "reset_peak_memory_stats": _nothing,
        "reset_accumulated_memory_stats": _nothing,
        "set_per_process_memory_fraction": _nothing,
        "memory_summary": lambda device=None, abbreviated=False: "",
    }


def _random() -> dict[str, Any]:
    def state(device: Any = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)  # a seed and an offset

    return {
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "seed": _nothing,
        "seed_all": _nothing,
        "initial_seed": lambda: 0,
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state()],
        "set_rng_state": _nothing,
        "set_rng_state_all": _nothing,
    }


def _accelerator() -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "set_device_index": _nothing,
        "set_device_idx": _nothing,
        "synchronize": _nothing,
    }


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _Device(contextlib.AbstractContextManager[None]):
    """`torch.cuda.device(0)`."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __exit__(self, *_: object) -> None:
        pass


class _Stream:
    """A stream whose work has always finished."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = self.stream_id = 0
        self.device = torch.device("cuda", 0)

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    synchronize = wait_event = wait_stream = _nothing


class _Event:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0

    record = wait = synchronize = _nothing
