"""`imagine()`: runs a block on an imagined card."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from pytracer import errors
from pytracer.analysis.allocator import settings as allocator_settings
from pytracer.basics.units import parse_size
from pytracer.capture.session import (
    Options,
    Session,
    allocator_settings as asked_settings,
    imagined,
)
from pytracer.data._native import C
from pytracer.data.recorded import Trace
from pytracer.imagined import (
    attention,
    checkpoints,
    cudnn,
    frameworks,
    hosts,
    kernels,
    recurrent,
    reductions,
    scratch,
    standins,
    surface,
)
from pytracer.imagined.adapter import CPU, Fakes, is_fake
from pytracer.imagined.cards import Card, find
from pytracer.imagined.convolutions import Convolutions, placed
from pytracer.imagined.doubts import Doubts
from pytracer.imagined.durations import Durations
from pytracer.imagined.patches import for_programs
from pytracer.imagined.ranks import Job
from pytracer.imagined.sizes import WAYS, Sizes
from pytracer.imagined.workspaces import Workspaces
from pytracer.reading.views import Views
from pytracer.sandbox.inside import Inside
from pytracer.sandbox.written import Change

if TYPE_CHECKING:
    from typing_extensions import Self

    from pytracer.analysis.forecasts.fits import Fits


class imagine(Views):  # noqa: N801 - reads as a verb: `with imagine("H100"):`
    """Runs the block on an imagined card: tensors have shapes but no memory.

    The program's own classes and step run unchanged. Build the model inside the block and from a
    configuration, because weights have no values here.

    Args:
        card: "H100", "A100-40GB", "RTX4090", ...; "cpu" imagines the host's memory.
        capacity: the card's memory, such as "80GiB"; the default is the table's.
        detail: as for `trace`: "op" or "category".
        stacks: also record the Python line of every allocation.
        assume: the values that decide a branch, by line: {"train.py:12": False}.
        ranks: of how many ranks the program is one. The default is what the program asks for.
        rank: which of them.
        sizes: "balanced" or "worst", for masks of the rows that a router gives to an expert.
        write: make the block's changes of files for real when it has ended. Otherwise the block sees
            a private view of the files, and `touched` lists what it would have changed.
        allow_network: let the block connect to other machines.
    """

    def __init__(
        self,
        card: str,
        capacity: int | str | None = None,
        *,
        detail: str = "op",
        stacks: bool = False,
        assume: Mapping[str, Any] | None = None,
        ranks: int | None = None,
        rank: int = 0,
        sizes: str | None = None,
        write: bool = False,
        allow_network: bool = False,
    ) -> None:
        """Checks the options. Changes nothing yet."""
        self._view = Inside(allow_network=allow_network, write=write)
        size = None if capacity is None else parse_size(capacity)
        self.card = None if card == CPU else find(card, size)
        self._options = Options(detail=detail, stacks=stacks)
        self._reads = standins.Reads(dict(assume or {}))
        if ranks is not None and not 0 <= rank < ranks:
            raise errors.UsageError(f"rank {rank} is not one of {ranks}: they count from 0")
        if sizes not in (None, *WAYS):
            raise errors.UsageError(f"sizes={sizes!r}: say one of {', '.join(WAYS)}")
        self._job = Job(ranks, rank, reads=self._reads)
        self._sizes, self._how = Sizes(sizes), sizes
        self._not_counted: set[str] = set()
        self._attention: attention.Attention | None = None
        self._doubts, self._durations = Doubts(), Durations()
        self._job.shelf.on_wait = self._durations.waited
        self._convolutions = Convolutions(self.card, cudnn.installed())
        self._stack = contextlib.ExitStack()
        self._session: _Session | None = None
        self._data: Trace | None = None

    def __enter__(self) -> "Self":
        """Puts the imagined card in place."""
        if standins.current:
            raise errors.CaptureError("a card is being imagined already: leave that block first")
        self._data = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._view)
            self._enter(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Removes the card. An exception of the block goes on."""
        session, self._session = self._session, None
        self._view.failed = error is not None
        with self._stack:
            if session is not None:
                self._data = session.stop()

    @property
    def data(self) -> Trace:
        """The recorded columns. Inside the block, those recorded so far."""
        if self._session is not None:
            return self._session.peek()
        if self._data is None:
            raise errors.CaptureError("nothing has been imagined yet: the block has not run")
        return self._data

    @property
    def touched(self) -> tuple[Change, ...]:
        """The files and folders that the block has changed in its private view."""
        return self._view.changes

    def step(self) -> None:
        """Marks the end of a training step."""
        if self._session is None:
            raise errors.CaptureError("step() belongs inside the `with imagine(...):` block")
        self._session.mark_step()

    def fits(
        self,
        on: int | str | None = None,
        settings: str | None = None,
        device: str | None = None,
        *,
        verify: str | Sequence[str] | bool = False,
    ) -> "Fits":
        """Whether the run fits, by default on the imagined card."""
        if on is None and self.card is not None:
            on = self.card.capacity
        return super().fits(on, settings, device, verify=verify)

    # ---------------------------------------------------------------- parts

    def _enter(self, stack: contextlib.ExitStack) -> None:
        rules = allocator_settings.parse(asked_settings()).rules(None, None) if self.card else {}
        device = C.ImaginedDevice(is_cuda=self.card is not None, rules=rules)
        is_cuda = self.card is not None
        session = _Session(self._options, device, self._job, self._document, is_cuda=is_cuda)
        standins.current.append(self._reads)
        stack.callback(standins.current.pop)
        session.start()
        stack.callback(session.abandon)
        imagined.append(session)
        stack.callback(imagined.remove, session)
        device.open()
        stack.callback(device.close)
        fakes = self._fakes(device, stack)
        self._compiler = fakes.compiler
        self._compiler.on_kernel = self._durations.generated
        stack.enter_context(fakes.entered())
        stack.enter_context(frameworks.imported())
        stack.enter_context(checkpoints.of_safetensors())
        self._session = session

    def _fakes(self, device: Any, stack: contextlib.ExitStack) -> Fakes:
        if self.card is None:
            for owner in (torch, torch.random):
                for name, answer in hosts.random_state().items():
                    stack.enter_context(for_programs(owner, name, answer))

            def noted(func: Any, args: Any, result: Any) -> None:
                if library := scratch.of_onednn(func):
                    self._not_counted.add(library)

            return Fakes(
                CPU,
                device,
                self._reads,
                None,
                noted,
                self._job,
                _nothing,
                self._sizes,
                self._doubts,
                self._convolutions,
                self._durations,
            )
        operator = self._attention = attention.Attention(self.card)
        library = attention.library(operator)
        stack.callback(library._destroy)
        recurrent.place(library, is_fake)
        kernels.place(library)
        stack.enter_context(placed())
        self._scratch = scratch.Taken(device)
        self._job.shelf.hold = device.hold
        stack.callback(register_optimizer_step_post_hook(self._durations.stepped).remove)
        self._workspaces = Workspaces(self.card, device)
        sums = reductions.Reductions(self.card)

        def ran(func: Any, args: Any, result: Any) -> None:
            self._workspaces.used_by(func, args)
            for blocks in (sums.scratch(func, args), *scratch.beside(func, args, result)):
                self._scratch.hold(*blocks)

        take = self._scratch.take
        stack.callback(self._convolutions.close)
        fakes = Fakes(
            "cuda",
            device,
            self._reads,
            operator,
            ran,
            self._job,
            take,
            self._sizes,
            self._doubts,
            self._convolutions,
            self._durations,
        )
        # Last, because the modules that torch imports for its fake tensors must see the real devices.
        stack.enter_context(surface.described(self.card, device, self._job.shelf))
        return fakes

    def _document(self) -> dict[str, Any]:
        card = self.card
        return {
            "card": CPU if card is None else card.name,
            "stand_ins": self._reads.listed(),
            "sizes": self._how,
            **self._compiler.document(self._attention is not None and self._attention.is_open),
            "not_counted": sorted(self._not_counted),
            "doubts": [*self._doubts.document(), *self._job.doubts()],
            **self._job.document(),
            **(
                {}
                if card is None
                else {
                    **_facts(card),
                    **self._scratch.document(any_end=self._job.shelf.has_kept),
                    "convolutions": self._convolutions.document(),
                    "step_ns": self._durations.step_ns(),
                }
            ),
        }


def _facts(card: Card) -> dict[str, Any]:
    return {
        "title": card.title,
        "capability": list(card.capability),
        "capacity": card.capacity,
        "source": card.source,
        "beside": card.beside,
    }


def _nothing(*_: Any) -> None:
    pass


class _Session(Session):
    """Records the imagined device, and no real one."""

    def __init__(
        self,
        options: Options,
        device: Any,
        job: Job,
        describe: Callable[[], dict[str, Any]],
        *,
        is_cuda: bool,
    ) -> None:
        super().__init__(options)
        self._describe = describe
        self._device, self._job, self._is_cuda = device, job, is_cuda

    def _look_once_more(self) -> None:
        super()._look_once_more()
        known = {*self._learned["ddp_buckets"], *self._job.buckets}
        self._learned["ddp_buckets"] = sorted(known)

    def _whole_meta(self) -> dict[str, Any]:
        return {**super()._whole_meta(), "imagined": self._describe()}

    def _allocator_counters(self) -> dict[str, Any]:
        return {"cuda:0": self._device.counters()} if self._is_cuda else {}


def is_imagining() -> bool:
    """Whether the program runs on an imagined card."""
    return bool(standins.current)
