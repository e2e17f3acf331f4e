"""Replaces the answers of `torch.cuda` for an imagined card. Scripts ask it before anything else."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytracer.basics import private_torch
from pytracer.data._native import C
from pytracer.imagined.cards import Card
from pytracer.imagined.patches import replaced
from pytracer.imagined.shelf import Shelf

# What a torch for the CPU says of a card's software: that of torch 2.11 for CUDA.
_RUNTIME, _NCCL = "13.0", (2, 28, 9)
Counters = Callable[[], dict[str, int]]
_STREAMS = 32  # torch has as many of a priority, and gives them out in turn


@contextlib.contextmanager
def described(card: Card, device: Any, shelf: Shelf) -> Iterator[None]:
    """Answers every question about devices for the one card, until the block ends.

    Args:
        card: the card.
        device: the imagined device, for its counters and its cache.
        shelf: is told when the program waits for a stream.
    """
    counters, trim = device.counters, device.trim
    chosen = Chosen()
    streams = Streams(shelf, chosen)
    waits = {"synchronize": lambda device=None: shelf.synchronized()}
    bindings = private_torch.bindings
    with contextlib.ExitStack() as stack:
        for owner, answers in (
            (torch.cuda, {**_cuda(card, counters, trim, chosen), **waits, **streams.answers()}),
            (torch.cuda.memory, _memory(card, counters, trim)),
            (torch.cuda.random, _random()),
            (torch.version, {"cuda": torch.version.cuda or _RUNTIME}),
            (torch.cuda.nccl, {"version": _of_nccl(torch.cuda.nccl.version)}),
            (torch.distributed, {"is_nccl_available": lambda: torch.distributed.is_available()}),
            (bindings, {"_cuda_getCurrentRawStream": lambda device: 0}),  # libraries import it
            (torch.accelerator, {**_accelerator(chosen), **waits, **streams.of_accelerators()}),
        ):
            for name, answer in answers.items():
                if hasattr(owner, name) or owner is bindings:
                    stack.enter_context(replaced(owner, name, answer))
        stack.callback(chosen.choose, 0)
        yield


def _of_nccl(asked: Callable[[], tuple[int, ...]]) -> Callable[[], tuple[int, ...]]:
    return asked if hasattr(private_torch.bindings, "_nccl_version") else lambda: _NCCL


def _cuda(
    card: Card, counters: Counters, trim: Callable[[], None], chosen: "Chosen"
) -> dict[str, Any]:
    properties = types.SimpleNamespace(
        name=card.title,
        major=card.capability[0],
        minor=card.capability[1],
        total_memory=card.capacity,
        multi_processor_count=card.processors,
        max_threads_per_multi_processor=card.threads_per_processor,
        max_threads_per_block=1024,
        regs_per_multiprocessor=1 << 16,
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
        "current_device": chosen.number,
        "set_device": chosen.choose,
        "_exchange_device": chosen.exchange,
        "_maybe_exchange_device": chosen.exchange,
        "get_device_name": lambda device=None: card.title,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [f"sm_{card.capability[0]}{card.capability[1]}"],
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or card.has_bfloat16
        ),
        "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda device, peer: False,
        "device": type("device", (_Device,), {"chosen": chosen}),
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
        "get_per_process_memory_fraction": lambda device=None: 1.0,
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


def _accelerator(chosen: "Chosen") -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": chosen.number,
        "current_device_idx": chosen.number,
        "set_device_index": chosen.choose,
        "set_device_idx": chosen.choose,
    }


def _nothing(*_: Any, **__: Any) -> None:
    pass


class Chosen:
    """The number of the current device. A rank may give its card any."""

    def __init__(self) -> None:
        """It is 0 at first."""
        self._number = 0

    def number(self) -> int:
        """What `torch.cuda.current_device()` says."""
        return self._number

    def choose(self, device: Any) -> None:
        """Makes it the current one."""
        number = max(self.number_of(device), 0)  # torch ignores a negative number
        if number != self._number:
            self._number = number
            private_torch.FakeTensorMode.cache_clear()  # it knows what "cuda" was

    def exchange(self, device: int) -> int:
        """Makes it the current one. Returns the number of the one before; -1 stays as it is."""
        before = self._number
        if device >= 0:
            self.choose(device)
        return before

    def number_of(self, device: Any) -> int:
        """The number of a device, which may be given in many ways."""
        if isinstance(device, _Device):
            return device.idx
        if isinstance(device, int):
            return device
        number: int | None = torch.device(device or "cuda").index
        return self._number if number is None else number


class _Device(contextlib.AbstractContextManager[None]):
    """`torch.cuda.device(0)`."""

    chosen: Chosen

    def __init__(self, device: Any) -> None:
        self.idx = self.chosen.number_of(device)
        self._before = 0

    def __enter__(self) -> None:
        self._before = self.chosen.number()
        self.chosen.choose(self.idx)

    def __exit__(self, *_: object) -> None:
        self.chosen.choose(self._before)


class Streams:
    """The streams of the card. The allocator keeps blocks for each of them."""

    def __init__(self, shelf: Shelf, chosen: "Chosen") -> None:
        """Makes the default stream.

        Args:
            shelf: is told when the program waits for a stream.
            chosen: the current device.
        """
        self.shelf, self.chosen = shelf, chosen
        self._made = 0
        self._type = type("Stream", (_Stream,), {"streams": self})
        self._event = type("Event", (_Event,), {"streams": self})
        self._default = self._type()
        self._by_number = {0: self._default}

    def answers(self) -> dict[str, Any]:
        """What `torch.cuda` says of streams."""
        return {
            "Stream": self._type,
            "ExternalStream": self._type,
            "Event": self._event,
            "stream": lambda stream: stream or contextlib.nullcontext(),
            "current_stream": lambda device=None: self.current,
            "default_stream": lambda device=None: self._default,
            "set_stream": self.set,
        }

    def of_accelerators(self) -> dict[str, Any]:
        """What `torch.accelerator` says of them."""
        return {"current_stream": lambda device=None: self.current, "set_stream": self.set}

    @property
    def current(self) -> Any:
        """The stream of the program, or of the node that a backward pass runs."""
        return self._by_number.get(C.imagined_stream(), self._default)

    def number(self) -> int:
        """The number of the next stream that is made. The first is the default stream."""
        self._made += 1
        return 1 + (self._made - 2) % _STREAMS if self._made > 1 else 0

    def let_go(self, stream: Any) -> list[int]:
        """As the shelf's, for this stream. None: the current one."""
        return self.shelf.let_go((stream or self.current).stream_id)

    def set(self, stream: Any) -> Any:
        """Makes the stream the current one. Returns the one before."""
        before = self.current
        if stream is not None:
            self._by_number[stream.stream_id] = stream
            C.use_imagined_stream(stream.stream_id)
        return before


class _Stream:
    """A stream whose work has always finished."""

    streams: Streams
    device_type = 1  # CUDA, as torch counts types
    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = self.native_handle = self.stream_id = self.streams.number()
        self.device_index = self.streams.chosen.number()
        self.device = torch.device("cuda", self.device_index)
        self._before: list[Any] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def record_event(self, event: Any = None) -> Any:
        event = torch.cuda.Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.streams.shelf.reached(self.streams.let_go(self))

    def __enter__(self) -> "_Stream":
        self._before.append(self.streams.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        self.streams.set(self._before.pop())

    wait_event = wait_stream = _nothing


class _Event:
    """An event that has always happened."""

    streams: Streams
    cuda_event = event_id = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", self.streams.chosen.number())
        self._done: list[int] = []  # what no stream needs any more once it has happened

    def record(self, stream: Any = None) -> None:
        self._done = self.streams.let_go(stream)

    def synchronize(self) -> None:
        self.streams.shelf.reached(self._done)
        self._done = []

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0

    wait = _nothing
