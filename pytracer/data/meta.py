"""The trace's meta document as typed fields, checked once.

A file may say anything, so `read` keeps only fields of the right type. A field that is missing or
of another type has the default below; readers need no guards. `docs/trace-format.md` describes the
document. Costs are a table of their own: see `cost/measurements.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from pytracer.data.model_names import Roots, roots_of
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import PHASES

_LONGEST_PHASE_NS = 10**15  # eleven days
_MOST_RANKS = 1_000_000
_MOST_STEPS = 1 << 31
_MOST_LINES = 1 << 31  # of a file of generated code

Kind = TypeVar("Kind")


class Options(NamedTuple):
    """The arguments of `trace()` that readers ask for."""

    devices: tuple[str, ...] = ()
    detail: str = ""
    saved_tensors: str = ""
    path: str = ""


class Process(NamedTuple):
    """A process on a GPU; `bytes` is None if NVML does not report its memory."""

    pid: int
    bytes: int | None
    name: str


class Gpu(NamedTuple):
    """One reading of a GPU. Fields that the driver did not report are None."""

    used: int | None
    driver_reserve: int | None
    used_as_cuda_says: int | None
    processes: tuple[Process, ...] | None
    total: int | None = None  # bytes of the whole card


class Reading(NamedTuple):
    """One reading of the GPUs, by UUID, and of the process."""

    when: str  # "begin", "step", "call", "end"
    unix_ns: int | None
    cuda_initialized: bool
    reserved: Mapping[str, int]  # by device: bytes that torch's allocator held
    gpus: Mapping[str, Gpu]
    host: Mapping[str, int]


class DeviceMemory(NamedTuple):
    """What the driver and the operating system reported while the trace was recorded."""

    pid: int | None
    problem: str
    uuids: Mapping[str, str]  # by device
    allowed: Mapping[str, int]  # by device: the limit of set_per_process_memory_fraction()
    readings: tuple[Reading, ...]


class PhaseTime(NamedTuple):
    """The device's time for one instance of a phase, between two ticks of the host."""

    phase: int
    begin: int
    end: int
    device_ns: int


class PhaseTimes(NamedTuple):
    """The phases that were measured, and how many were not."""

    rows: tuple[PhaseTime, ...]
    missing: int


class OwnTicks(NamedTuple):
    """Processor time of recording; see `own_time` in `docs/trace-format.md`."""

    ticks: int = 0
    ns: int = 0
    of_ticks: int = 0
    waited_ns: int = 0


class Doubt(NamedTuple):
    """What an imagined run has seen that no card would do."""

    bytes: int
    asked_by: str  # the file of torch's bookkeeping that asked for them; "" for a sharded tensor
    share: int | None  # the most that the tensor may have on a rank
    left_out: str = ""  # the line whose backward leaves out parameters that another rank may use
    says: str = ""  # the reason itself


class Imagined(NamedTuple):
    """The device of an imagined run."""

    title: str
    capacity: int | None  # of the card; None for a host
    beside: int | None  # bytes outside of torch's allocator, if they were ever measured
    stand_ins: tuple[Mapping[str, Any], ...]  # values that the program read
    compiled: tuple[str, ...] = ()  # functions that ran as they are, in files of earlier releases
    not_followed: tuple[str, ...] = ()  # why compiled code may take other memory
    padded: int = 0  # bytes of the largest operand that a compiler may pad, if that is faster
    ranks: int = 1
    rank: int = 0
    # With cuDNN's scratch and what NCCL keeps, if that may make the peak higher.
    peak_at_most: int | None = None
    reserved_at_least: int | None = None
    reserved_at_most: int | None = None
    scratch_at_most: int = 0
    not_counted: tuple[str, ...] = ()  # layers whose memory on a host only their library knows
    doubts: tuple[Doubt, ...] = ()
    left_out: tuple[str, ...] = ()  # lines whose gradients may be of other ranks
    advice: str = ""  # what would make the scratch of convolutions sure
    step_ns: tuple[int, ...] = ()  # a step's time on several hosts, to compare with other runs


class Group(NamedTuple):
    """A process group, with the numbers of its last collectives if torch tells them."""

    name: str
    description: str  # "default_pg", "mesh_shard"
    backend: str
    ranks: tuple[int, ...]  # of the job
    enqueued: int | None
    completed: int | None


class Collective(NamedTuple):
    """A collective, a send or a receive that this rank began."""

    group: int  # its row in the groups
    operation: str
    sequence: int  # equal on all ranks of the group
    point_to_point: bool
    bytes: int
    begin_ns: int  # Unix time
    end_ns: int  # when torch noticed its end; 0: never


class Communication(NamedTuple):
    """The groups of this rank, and the collectives that torch's flight recorder had at the end."""

    groups: tuple[Group, ...] = ()
    collectives: tuple[Collective, ...] = ()
    forgotten: int = 0
    memory: Mapping[str, int] = {}  # by communicator: device bytes, as its library says


class ClockReading(NamedTuple):
    """A number that the job's store gave, and this host's Unix time before and after."""

    number: int
    before_ns: int
    after_ns: int


class Variable(NamedTuple):
    """A variable of the program as the recording ended, with the addresses of its tensors."""

    name: str
    addresses: tuple[int, ...]
    graph_addresses: tuple[int, ...]
    behind_numbers: tuple[int, ...]
    bound: int  # how many items it may hold at most; 0: any number
    path: str  # from a root of the program to its tensors; "" in older files


class CompiledValue(NamedTuple):
    """What a block of compiled code holds from one of its lines on."""

    begin: int = 0  # the line of the generated code
    op: str = ""
    module: str = ""  # its path, if only one can be meant
    below: str | None = None  # its path inside the module that ran the code; None: not known
    stack: int = 0  # a row of the stack table
    recomputed: bool = False


class CompiledLine(NamedTuple):
    """A line that allocates in generated code, and what its block holds, in order."""

    file: str
    line: int
    values: tuple[CompiledValue, ...]


class Share(NamedTuple):
    """What this rank has of the parameters that are sharded in one way."""

    how: str  # "Shard(0) over fsdp=4"
    local_bytes: int
    global_bytes: int


class Parameter(NamedTuple):
    """A parameter by its name in the whole model, and this rank's part of it."""

    name: str
    how: str  # as in Share; "" for a parameter that is whole here
    over: str  # the dimensions of the mesh that cut it: "shard", "shard x tensor"
    local_bytes: int
    global_bytes: int


class Sharding(NamedTuple):
    """How the model is spread over the ranks, read from its wrappers and its parameters."""

    wrappers: tuple[str, ...] = ()  # "DDP", "FSDP", "FSDP2", "ZeRO", "DataParallel"
    shares: tuple[Share, ...] = ()
    parameters: tuple[Parameter, ...] = ()


class Meta(NamedTuple):
    """The document's fields."""

    imported: str  # "memory_snapshot" or "pytracer"; empty for a recording
    lacks: tuple[str, ...]  # what a memory snapshot would need: "stacks", "ring", ...
    command: str
    directory: str
    host: str
    pid: int | None
    rank: int
    world_size: int
    options: Options
    allocator_settings: Mapping[str, Any]  # as torch lists them
    counters: Mapping[str, Mapping[str, Mapping[str, int]]]  # by moment, device and name
    ddp_buckets: tuple[int, ...]
    ddp_hooked: tuple[int, ...]  # those that a communication hook gets
    roots: Roots
    frozen_modules: frozenset[str]
    left_behind: frozenset[int]  # addresses of weights that an optimizer has and no model any more
    unstepped: frozenset[str]  # parameters with a gradient that no optimizer has stepped
    renamed: Mapping[str, str]
    device_memory: DeviceMemory
    phase_times: PhaseTimes
    names_threads: bool
    frameworks: tuple[str, ...]  # "transformers.Trainer"
    cells: Mapping[str, str]  # of a notebook, by file: "In[3]"
    modules_tell_modes: bool
    cuda_problem: str
    calls_problem: str
    variables: tuple[Variable, ...]
    search_cut: str  # where the search for variables ended early: "after 100,000 objects"
    failed: bool
    ended_by: str  # the exception that ended the recording, of a kind and with its text
    callback_errors: int
    own_time: OwnTicks
    imagined: Imagined | None
    first_step: int
    sharding: Sharding
    communication: Communication
    clock_readings: tuple[ClockReading, ...]
    compiled: tuple[CompiledLine, ...]

    @property
    def alloc_conf(self) -> str:
        """What PYTORCH_ALLOC_CONF held."""
        return _text(self.allocator_settings.get("PYTORCH_CUDA_ALLOC_CONF"))


@once_per_trace
def of(trace: Trace) -> Meta:
    """The fields of the trace's document."""
    return read(trace.meta)


def read(document: Mapping[str, Any]) -> Meta:
    """The fields of any document."""
    get = document.get
    return Meta(
        imported=_text(get("imported")),
        lacks=_each(str, get("lacks")),
        command=_text(get("command")),
        directory=_text(get("directory")),
        host=_text(get("host")),
        pid=_whole(get("pid")),
        rank=_below(_MOST_RANKS, get("rank")),
        world_size=_whole(get("world_size")) or 1,
        options=_options(_mapping(get("options"))),
        allocator_settings=_settings(get("allocator_settings")),
        counters=_counters(get("counters")),
        ddp_buckets=_each(int, get("ddp_buckets")),
        ddp_hooked=_each(int, get("ddp_hooked")),
        roots=roots_of(document),
        frozen_modules=frozenset(_each(str, get("frozen_modules"))),
        left_behind=frozenset(_each(int, get("left_behind"))),
        unstepped=frozenset(_each(str, get("unstepped"))),
        renamed=_values(str, get("renamed")),
        device_memory=_device_memory(_mapping(get("device_memory"))),
        phase_times=_phase_times(_mapping(get("phase_times"))),
        names_threads="thread_names" in document,
        frameworks=_each(str, get("frameworks")),
        cells=_values(str, get("cells")),
        modules_tell_modes="module_modes" in document,
        cuda_problem=_text(get("cuda_problem")),
        calls_problem=_text(get("calls_problem")),
        variables=tuple(map(_variable, _objects(get("variables")))),
        search_cut=_text(get("search_cut")),
        failed=get("failed") is True,
        ended_by=_text(get("ended_by")),
        callback_errors=_whole(get("callback_errors")) or 0,
        own_time=_own_time(_mapping(get("own_time"))),
        imagined=_imagined(get("imagined")),
        first_step=_below(_MOST_STEPS, get("first_step")),
        sharding=_sharding(_mapping(get("sharding"))),
        communication=_communication(_mapping(get("communication"))),
        clock_readings=tuple(_clock_readings(get("clock_readings"))),
        compiled=tuple(map(_compiled_line, _objects(get("compiled")))),
    )


# ---------------------------------------------------------------- the document's parts


def _options(document: Mapping[str, Any]) -> Options:
    get = document.get
    return Options(
        devices=_each(str, get("devices")),
        detail=_text(get("detail")),
        saved_tensors=_text(get("saved_tensors")),
        path=_text(get("path")),
    )


def _settings(value: Any) -> Mapping[str, Any]:
    """A recording has the environment's text, a memory snapshot a table of torch's."""
    if isinstance(value, str):
        return {"PYTORCH_CUDA_ALLOC_CONF": value} if value else {}
    return _mapping(value)


def _counters(value: Any) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
    return {
        moment: {device: _values(int, figures) for device, figures in _objects_in(each).items()}
        for moment, each in _objects_in(value).items()
    }


def _device_memory(document: Mapping[str, Any]) -> DeviceMemory:
    get = document.get
    return DeviceMemory(
        pid=_whole(get("pid")),
        problem=_text(get("problem")),
        uuids=_values(str, get("devices")),
        allowed=_values(int, get("allowed")),
        readings=tuple(map(_reading, _objects(get("readings")))),
    )


def _reading(document: Mapping[str, Any]) -> Reading:
    get = document.get
    gpus = _objects_in(get("gpus"))
    return Reading(
        when=_text(get("when")),
        unix_ns=_whole(get("unix_ns")),
        cuda_initialized=get("cuda_initialized") is True,
        reserved=_values(int, get("reserved")),
        gpus={uuid: _gpu(gpu) for uuid, gpu in gpus.items() if gpu},
        host=_values(int, get("host")),
    )


def _gpu(document: Mapping[str, Any]) -> Gpu:
    get = document.get
    listed = get("processes")
    return Gpu(
        used=_whole(get("used")),
        driver_reserve=_whole(get("driver_reserve")),
        used_as_cuda_says=_whole(get("used_as_cuda_says")),
        processes=tuple(_processes(listed)) if isinstance(listed, list) else None,
        total=_whole(get("total")),
    )


def _processes(listed: list[Any]) -> Iterator[Process]:
    for row in _objects(listed):
        if (pid := _whole(row.get("pid"))) is not None:
            yield Process(pid, _whole(row.get("bytes")), _text(row.get("name")))


def _phase_times(document: Mapping[str, Any]) -> PhaseTimes:
    columns = [document.get(name) for name in PhaseTime._fields]
    if not all(isinstance(column, list) for column in columns):
        columns = []
    rows = (PhaseTime(*row) for row in zip(*columns, strict=False))
    return PhaseTimes(
        tuple(row for row in rows if _is_possible(row)),
        max(_whole(document.get("missing")) or 0, 0),
    )


def _is_possible(row: PhaseTime) -> bool:
    if not all(type(value) is int for value in row) or not 0 <= row.phase < len(PHASES):
        return False
    return 0 <= row.begin <= row.end < 2**63 and 0 <= row.device_ns < _LONGEST_PHASE_NS


def _own_time(document: Mapping[str, Any]) -> OwnTicks:
    values = [_whole(document.get(name)) for name in OwnTicks._fields]
    figures = [value for value in values if value is not None and 0 <= value < 2**63]
    return OwnTicks(*figures) if len(figures) == len(values) else OwnTicks()


def _imagined(value: Any) -> Imagined | None:
    if not isinstance(value, dict):
        return None
    return Imagined(
        title=_text(value.get("title")) or _text(value.get("card")),
        capacity=_whole(value.get("capacity")),
        beside=_whole(value.get("beside")),
        stand_ins=_objects(value.get("stand_ins")),
        compiled=_each(str, value.get("compiled")),
        not_followed=_each(str, value.get("not_followed")),
        padded=_whole(value.get("padded")) or 0,
        ranks=_whole(value.get("ranks")) or 1,
        rank=_whole(value.get("rank")) or 0,
        peak_at_most=_whole(value.get("peak_at_most")),
        reserved_at_least=_whole(value.get("reserved_at_least")),
        reserved_at_most=_whole(value.get("reserved_at_most")),
        scratch_at_most=_whole(value.get("scratch_at_most")) or 0,
        not_counted=_each(str, value.get("not_counted")),
        doubts=tuple(
            Doubt(
                size,
                _text(row.get("asked_by")),
                _whole(row.get("share")),
                _text(row.get("left_out")),
                _text(row.get("says")),
            )
            for row in _objects(value.get("doubts"))
            if (size := _whole(row.get("bytes"))) is not None
        ),
        left_out=_each(str, value.get("left_out")),
        advice=_advice(value.get("convolutions")),
        step_ns=_each(int, value.get("step_ns")),
    )


def _advice(convolutions: Any) -> str:
    return _text(convolutions.get("advice")) if isinstance(convolutions, dict) else ""


def _sharding(document: Mapping[str, Any]) -> Sharding:
    shares = (
        Share(_text(each.get("how")), local, whole)
        for each in _objects(document.get("shares"))
        if (local := _whole(each.get("local_bytes"))) is not None
        and (whole := _whole(each.get("global_bytes"))) is not None
        and 0 <= local <= whole
    )
    return Sharding(
        _each(str, document.get("wrappers")),
        tuple(shares),
        tuple(_parameters(_objects(document.get("parameters")))),
    )


def _parameters(rows: Iterable[Mapping[str, Any]]) -> Iterator[Parameter]:
    for row in rows:
        local, whole = _whole(row.get("local_bytes")), _whole(row.get("global_bytes"))
        if local is not None and whole is not None and local >= 0 and whole >= 0:
            name, how, over = (_text(row.get(key)) for key in ("name", "how", "over"))
            yield Parameter(name, how, over, local, whole)


def _communication(document: Mapping[str, Any]) -> Communication:
    get = document.get
    groups = tuple(map(_group, _objects(get("groups"))))
    columns = [_mapping(get("collectives")).get(name) for name in Collective._fields]
    if not all(isinstance(column, list) for column in columns):
        columns = []
    rows = (Collective(*row) for row in zip(*columns, strict=False))
    memory: dict[str, int] = {}  # groups may have the same description
    for each in _objects(get("memory")):
        size, name = _whole(each.get("bytes")), _text(each.get("group"))
        if size is not None and 0 <= size < 2**62:
            memory[name] = memory.get(name, 0) + size
    return Communication(
        groups,
        tuple(row for row in rows if _is_collective(row, len(groups))),
        max(_whole(get("forgotten")) or 0, 0),
        memory,
    )


def _group(document: Mapping[str, Any]) -> Group:
    get = document.get
    name, description, backend = (_text(get(key)) for key in ("name", "description", "backend"))
    ranks = tuple(rank for rank in _each(int, get("ranks")) if 0 <= rank < _MOST_RANKS)
    numbers = _whole(get("enqueued")), _whole(get("completed"))
    return Group(name, description, backend, ranks, *numbers)


def _is_collective(row: Collective, groups: int) -> bool:
    numbers = (row.group, row.sequence, row.bytes, row.begin_ns, row.end_ns)
    if not all(type(each) is int and 0 <= each < 2**63 for each in numbers):
        return False
    return row.group < groups and type(row.operation) is str and type(row.point_to_point) is bool


def _clock_readings(value: Any) -> Iterator[ClockReading]:
    for row in value if isinstance(value, list) else ():
        if isinstance(row, list) and len(row) == len(ClockReading._fields):
            reading = ClockReading(*row)
            if all(type(each) is int and 0 <= each < 2**63 for each in reading):
                yield reading


def _compiled_line(document: Mapping[str, Any]) -> CompiledLine:
    return CompiledLine(
        _text(document.get("file")),
        _whole(document.get("line")) or 0,
        tuple(
            CompiledValue(
                begin=_below(_MOST_LINES, row.get("from")),
                op=_text(row.get("op")),
                module=_text(row.get("module")),
                below=row["below"] if isinstance(row.get("below"), str) else None,
                stack=_below(2**32, row.get("stack")),
                recomputed=row.get("recomputed") is True,
            )
            for row in _objects(document.get("values"))
        ),
    )


def _variable(document: Mapping[str, Any]) -> Variable:
    lists = (_each(int, document.get(name)) for name in Variable._fields[1:4])
    own, saved, behind = (tuple(one for one in each if 0 <= one < 2**64) for each in lists)
    bound = _whole(document.get("bound")) or 0
    name, path = (_text(document.get(key)) for key in ("name", "path"))
    return Variable(name, own, saved, behind, bound, path)


# ---------------------------------------------------------------- values


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _below(end: int, value: Any) -> int:
    number = _whole(value)
    return number if number is not None and 0 <= number < end else 0


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _each(kind: Callable[..., Kind], value: Any) -> tuple[Kind, ...]:
    """The list's items of that very type: True is no number."""
    return tuple(item for item in value if type(item) is kind) if isinstance(value, list) else ()


def _objects(value: Any) -> tuple[dict[str, Any], ...]:
    return _each(dict, value)


def _values(kind: Callable[..., Kind], value: Any) -> dict[str, Kind]:
    """The object's members of that very type."""
    return {key: item for key, item in _mapping(value).items() if type(item) is kind}


def _objects_in(value: Any) -> dict[str, dict[str, Any]]:
    return _values(dict, value)
