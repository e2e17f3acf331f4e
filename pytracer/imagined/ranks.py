"""The other ranks of an imagined run: a process group with one real member.

The program's own code runs: FSDP, tensor and pipeline parallelism, DistributedDataParallel and its
buckets. Only collectives do not: their results have a size and no values. Where values matter, as
when DDP compares shapes, every rank has this rank's values.
"""

import contextlib
import hashlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from pytracer import errors
from pytracer.basics import private_torch
from pytracer.basics.private_torch import tree_iter, without_modes
from pytracer.imagined.known import Known
from pytracer.imagined.patches import replaced
from pytracer.imagined.shelf import Shelf
from pytracer.imagined.standins import Reads, where

c10d = torch.ops.c10d
_FAKE = "fake"
# Torch's own code goes by their names.
_ONE_CARD_PER_NODE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "{rank}"}
_MEETING_POINT = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


_STATIC = (
    "static_graph=True is not followed by a torch for CUDA, where the reducer reads the device's clock: "
    "imagine it with a torch for the CPU"
)


def _digest() -> Any:
    return hashlib.blake2b(digest_size=8)


@dataclass
class Job:
    """The ranks that are imagined, and the one that runs."""

    ranks: int | None = None  # None: the program says it
    rank: int = 0
    meshes: list[dict[str, Any]] = field(default_factory=list)  # those that the program made
    buckets: set[int] = field(default_factory=set)  # bytes of DDP's
    talks: bool = False  # one rank sends to another, so ranks differ
    shelf: Shelf = field(default_factory=Shelf)
    reads: Reads = field(default_factory=lambda: Reads({}))  # what the program was told to assume
    parameters: dict[int, list[int]] = field(default_factory=dict)  # DDP's bytes, by their number
    left_out: dict[str, int] = field(default_factory=dict)  # bytes of parameters, by line
    not_followed: bool = False  # a static graph of DDP's
    program: Any = field(default_factory=_digest)  # of the operators on the device, in order
    values: Any = field(default_factory=_digest)  # of the known values given to other ranks

    def document(self) -> dict[str, Any]:
        """What the trace keeps of it."""
        if self.ranks is None:
            return {}
        return {
            "ranks": self.ranks,
            "rank": self.rank,
            "meshes": self.meshes,
            "point_to_point": self.talks,
            "program": self.program.hexdigest(),
            "values": self.values.hexdigest(),
            "relies": sorted(self.reads.shared),
        }

    def ran(self, func: Any) -> None:
        """An operator ran on the device. What runs without gradients may be padding, or a log."""
        if torch.is_grad_enabled():
            self.program.update(func.name().encode())

    def doubts(self) -> list[dict[str, Any]]:
        """What other ranks may do otherwise than this one, and what is not followed."""
        rows: list[dict[str, Any]] = [
            {"bytes": size, "left_out": line} for line, size in self.left_out.items()
        ]
        return [*rows, {"bytes": 0, "says": _STATIC}] if self.not_followed else rows


@contextlib.contextmanager
def placed(job: Job, known: Known) -> Iterator[None]:
    """Makes the program one of the job's ranks, until the block ends."""
    if not dist.is_available():
        yield
        return
    groups = private_torch.process_groups
    had_group, hook = dist.is_initialized(), sys.excepthook
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        if job.ranks is not None:
            stack.enter_context(_environment(job))
        for owner, name, replacement in (
            (groups, "rendezvous", _meet(job)),
            (groups, "_get_default_timeout", lambda backend: groups.default_pg_timeout),
            (groups, "_new_process_group_helper", _make_fake(groups._new_process_group_helper)),
            (
                private_torch.device_mesh,
                "__init__",
                _noted(private_torch.device_mesh.__init__, job),
            ),
            *_of_objects(job.reads),
            *_of_ddp(known, job),
            *_of_waits(job.shelf),
        ):
            stack.enter_context(replaced(owner, name, replacement))
        yield
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()
            sys.excepthook = hook


def collective(func: Any, args: tuple[Any, ...], known: Known, job: Job) -> Any:
    """The result of an operator of `torch.ops.c10d`, which no backend runs."""
    job.talks = job.talks or func in _POINT_TO_POINT
    job.ran(func)
    outputs = _tensors(args[0])
    for one in _tensors(args[:2]) if func in _SPREADS else ():
        if (value := known.value_of(one)) is not None:
            with without_modes():
                job.values.update(str(value.tolist()).encode())
    _shelve(func, args, outputs, job.shelf)
    if func in _GATHERS:
        given = _tensors(args[1])
        _like_nccl(func, outputs, given)
        known.repeat(outputs, given)
    elif func is c10d.allreduce_.default and (combine := _combination(*args[1:3])):
        known.change(outputs, combine)
        _sum_of_used(outputs, known, job)
    elif func not in _KEEP_VALUES:
        known.forget(outputs)
    kinds = [str(one.type) for one in func._schema.returns]
    if not kinds:
        return None
    work = _finished(outputs)
    return (args[0], work) if len(kinds) == 2 else work


_GATHERS = frozenset((c10d.allgather_.default, c10d._allgather_base_.default))
_POINT_TO_POINT = frozenset((c10d.send.default, c10d.recv_.default, c10d.recv_any_source_.default))
_SPREADS = frozenset((*_GATHERS, c10d.allreduce_.default, c10d.broadcast_.default))
_KEEP_VALUES = frozenset((c10d.broadcast_.default, c10d.send.default, c10d.barrier.default))


def _combination(group: Any, operation: Any) -> Callable[[Any], Any] | None:
    """What becomes of a value that each rank has, if it is known."""
    ranks = dist.ProcessGroup.unbox(group).size()
    kinds: Any = dist.ReduceOp.RedOpType
    combinations: dict[Any, Callable[[Any], Any]] = {
        kinds.SUM: lambda value: value * ranks,
        kinds.PRODUCT: lambda value: value**ranks,
        **dict.fromkeys(
            (kinds.AVG, kinds.MIN, kinds.MAX, kinds.BAND, kinds.BOR), lambda value: value
        ),
    }
    return combinations.get(kinds(operation.op()))


def _sum_of_used(tensors: list[Any], known: Known, job: Job) -> None:
    """Adds what other ranks say to DDP's numbers of which parameters have a gradient.

    A parameter that this rank leaves out gets a gradient if another rank uses it. Unless that is assumed,
    none is taken to do so, and the run doubts itself.
    """
    used = tensors[0]
    sizes = job.parameters.get(used.numel())
    in_backward = private_torch.backward_pass_number() != -1
    if sizes is None or used.dtype != torch.int32 or not in_backward:
        return
    value = known.value_of(used)
    if value is None:
        return
    with without_modes():
        absent = (value == 0).nonzero().flatten().tolist()
        if not absent:
            return
        line = where()
        others_use = job.reads.assumed(line)
        if others_use:
            value.fill_(1)
    if others_use is None:
        size = sum(sizes[number] for number in absent)
        job.left_out[line] = max(size, job.left_out.get(line, 0))


def _tensors(value: Any) -> list[Any]:
    return [one for one in tree_iter(value) if isinstance(one, torch.Tensor)]


def _shelve(func: Any, args: tuple[Any, ...], outputs: list[Any], shelf: Shelf) -> None:
    """Keeps the tensors as long as NCCL's process group does."""
    shelf.begins()
    if func in _POINT_TO_POINT:
        shelf.sent(outputs)
        return
    names = [one.name for one in func._schema.arguments]
    at = names.index("async_op") if "async_op" in names else len(names)
    is_async = args[at] if at < len(args) else at < len(names)  # its default is true
    if is_async:
        shelf.stash(_tensors(args[:2]), outputs)


def _like_nccl(func: Any, outputs: list[Any], given: list[Any]) -> None:
    """Takes what NCCL's group takes for a moment: one flat tensor for a list of equal outputs."""
    if func is c10d.allgather_.default and len(outputs) > 1 and given[0].device.type == "cuda":
        given[0].new_empty(sum(one.numel() for one in outputs))


def _finished(tensors: list[Any]) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors)
    return private_torch.work_of_future(future).boxed()


# ---------------------------------------------------------------- process groups


def _meet(job: Job) -> Callable[..., Iterator[Any]]:
    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[Any]:
        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", 0))
        if job.ranks is None and not size:
            raise errors.CannotImagine(
                "the program is one rank of several: say of how many, with ranks=8 or --ranks 8"
            )
        if job.ranks is None:
            job.ranks = size
            job.rank = rank if rank >= 0 else int(os.environ.get("RANK", 0))
        elif size != job.ranks:
            raise errors.CannotImagine(
                f"the program wants {size} ranks, and {job.ranks} are imagined: name the same number"
            )
        yield private_torch.FakeStore(), job.rank, job.ranks

    return rendezvous


def _make_fake(helper: Callable[..., Any]) -> Callable[..., Any]:
    """Makes each group's backend one that does nothing."""

    def make(size: int, rank: int, ranks: Any, backend: Any, *rest: Any, **options: Any) -> Any:
        for name in ("backend_options", "pg_options", "device_id"):
            if options.get(name) is not None:
                options[name] = None
        return helper(size, rank, ranks, dist.Backend(_FAKE), *rest, **options)

    _ = private_torch.FakeStore  # its module registers the backend
    return make


def _noted(make: Callable[..., None], job: Job) -> Callable[..., None]:
    def init(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        names = self.mesh_dim_names
        mesh = {"shape": list(self.shape), "names": list(names) if names else None}
        if mesh not in job.meshes:
            job.meshes.append(mesh)

    return init


def _of_objects(reads: Reads) -> Iterator[tuple[Any, str, Any]]:
    """Objects are pickled into tensors, which have no values. Every rank has this rank's object."""

    def all_gather(objects: list[Any], one: Any, *_: Any, **__: Any) -> None:
        objects[:] = [one] * len(objects)
        reads.number(bool)  # lists the line

    def gather(one: Any, objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if objects is not None:
            all_gather(objects, one)

    def scatter(to: list[Any], objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if not objects:
            receive()
        to[0] = (objects or to)[0]

    def receive(*_: Any, **__: Any) -> None:
        raise errors.CannotImagine(
            f"{where()}: the program receives an object from another rank, which does not run; skip "
            "it while imagining: `if not pytracer.is_imagining():`. A PipelineStage needs no object "
            "if it gets input_args and output_args"
        )

    def nothing(*_: Any, **__: Any) -> None:
        pass

    for name, answer in (
        ("all_gather_object", all_gather),
        ("gather_object", gather),
        ("scatter_object_list", scatter),
        ("broadcast_object_list", nothing),
        ("send_object_list", nothing),
        ("recv_object_list", receive),
    ):
        yield private_torch.process_groups, name, answer
        yield dist, name, answer


def _of_ddp(known: Known, job: Job) -> Iterator[tuple[Any, str, Any]]:
    """DDP's reducer is C++ that reads small tensors on the host by pointer."""

    def grounded(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with known.grounding(), job.shelf.waiting():
                return original(*args, **options)

        return call

    rebuild = grounded(private_torch.reducer._rebuild_buckets)

    make = grounded(private_torch.reducer.__init__)

    def note(reducer: Any) -> None:
        with without_modes():  # so that nobody hears of the copies
            copies = reducer._get_zeros_like_grad_buckets()
            job.buckets |= {copy.buffer().untyped_storage().nbytes() for copy in copies}

    def make_and_note(reducer: Any, *args: Any, **options: Any) -> None:
        make(reducer, *args, **options)
        job.parameters[len(args[0])] = [one.nbytes for one in args[0]]
        note(reducer)

    def rebuild_and_note(reducer: Any) -> Any:
        has_rebuilt = rebuild(reducer)
        if has_rebuilt:
            note(reducer)
        return has_rebuilt

    verify = "_verify_params_across_processes"
    yield dist, verify, grounded(getattr(dist, verify))
    yield private_torch.reducer, "__init__", make_and_note
    yield private_torch.reducer, "_rebuild_buckets", rebuild_and_note
    yield private_torch.reducers_log, "set_runtime_stats_and_log", lambda self: None
    if torch.backends.cuda.is_built():  # then it measures times with the device's clock
        set_static = private_torch.reducer._set_static_graph

        def set_and_doubt(reducer: Any) -> None:
            set_static(reducer)
            job.not_followed = True

        yield private_torch.reducer, "prepare_for_forward", lambda self: None
        yield private_torch.reducer, "_set_static_graph", set_and_doubt


def _of_waits(shelf: Shelf) -> Iterator[tuple[Any, str, Any]]:
    """Where the program waits for a collective, or talks to other ranks in a batch."""
    wait, batch_isend_irecv = dist.Work.wait, dist.batch_isend_irecv
    coalesced = private_torch.broadcast_coalesced

    def wait_and_tell(work: Any, *args: Any, **options: Any) -> Any:
        result = wait(work, *args, **options)
        shelf.waited(_tensors(work.get_future().value()))
        return result

    def broadcast(*args: Any, **options: Any) -> Any:
        with shelf.waiting():
            return coalesced(*args, **options)

    def batch(operations: list[Any]) -> list[Any]:
        works = batch_isend_irecv(operations)
        if operations[0].tensor.is_cuda:  # NCCL's one work for all of them keeps no tensor
            return [_finished([])]
        return list(works)

    yield dist.Work, "wait", wait_and_tell
    yield dist, "_broadcast_coalesced", broadcast
    yield dist, "batch_isend_irecv", batch
    yield private_torch.process_groups, "batch_isend_irecv", batch


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides torch's warning about fake tensors that are read by pointer: these have memory."""
    text = re.compile("Accessing the data pointer of FakeTensor")
    hidden = ("ignore", text, UserWarning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, hidden)  # after filterwarnings() Python shows the program's warnings again
    try:
        yield
    finally:
        if hidden in filters:
            filters.remove(hidden)


@contextlib.contextmanager
def _environment(job: Job) -> Iterator[None]:
    """What `torchrun` sets, with one card per node."""
    wanted = {"RANK": str(job.rank), "WORLD_SIZE": str(job.ranks), **_ONE_CARD_PER_NODE}
    wanted = {name: text.format(rank=job.rank) for name, text in wanted.items()}
    before = dict(os.environ)
    os.environ.update(wanted)
    for name, text in _MEETING_POINT.items():
        os.environ.setdefault(name, text)
    try:
        yield
    finally:
        for name in (*wanted, *_MEETING_POINT):
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)
