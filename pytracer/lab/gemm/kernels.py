"""The kernel that a product runs, and the facts in the kernel's name.

The name is the diagnosis: an sm80 kernel on an sm90 device means that the operands were not aligned
for the device's own loads. Names give tiles in BLAS's order, which is that of the transposed
product. The first number counts columns of torch's result, the second rows. So a product with few
rows runs kernels such as `192x8`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from pytracer import errors
from pytracer.basics import private_torch
from pytracer.lab.gemm.operands import Prepared, as_asked, bytes_of, prepare
from pytracer.lab.gemm.shapes import Gemm

_MOST_AT_ONCE = 64
_MOST_BYTES_AT_ONCE = 8 << 30


@dataclass(frozen=True)
class Kernel:
    """The facts in a kernel's name; None for a fact that the name does not have."""

    name: str
    arch: int | None = None  # 80, 90, ...: the generation that it was written for
    tile_m: int | None = None  # rows of torch's result
    tile_n: int | None = None
    tile_k: int | None = None
    stages: int | None = None
    cluster: tuple[int, int] | None = None
    align: int | None = None  # elements; only CUTLASS's older kernels have it
    split_k: bool = False

    @property
    def generation(self) -> str:
        """Such as sm90, or a question mark if it is unknown."""
        return f"sm{self.arch}" if self.arch else "?"


_ARCH = (
    re.compile(r"(?:^|[^a-z])sm(\d{2,3})(?:_|$)"),
    re.compile(r"cutlass_(\d{2,3})_"),
    re.compile(r"cutlass3x_sm(\d{2,3})_"),
)
_FAMILIES = {"volta_": 70, "turing_": 75, "ampere_": 80, "nvjet_": 90}
_TILE_SIZE = re.compile(r"tilesize(\d+)x(\d+)x(\d+)")
_STAGE = re.compile(r"stage(\d+)")
_NVJET = re.compile(r"_(\d+)x(\d+)_(\d+)x(\d+)_(\d+)x(\d+)_")
_LDG_STAGES = re.compile(r"_(\d+)x(\d+)_(?:\w+_)?stages_(\d+)x(\d+)")
_TILE_AND_STAGES = re.compile(r"_(\d+)x(\d+)_(\d+)x(\d+)(?:_|$)")
_TILE = re.compile(r"_(\d+)x(\d+)(?:x(\d+))?(?:_|$)")
_ALIGN = re.compile(r"align(\d+)")
_SPLIT = re.compile(r"split_?k|segment_k(?!_off)", re.IGNORECASE)
_HELPERS = re.compile(
    r"reduce|memset|fill|elementwise|vectorized|copy|spin|cast|triton_(poi|red|per)", re.IGNORECASE
)


def parse(name: str) -> Kernel:
    """Reads a name of cuBLAS, cuBLASLt or CUTLASS."""
    match = _TILE_SIZE.search(name)
    tile: tuple[int | None, ...] = (None, None, None)
    stages: int | None = None
    cluster: tuple[int, int] | None = None
    if match:
        tile = tuple(map(int, match.groups()))
        stage = _STAGE.search(name)
        stages = int(stage[1]) if stage else None
    elif name.startswith("nvjet") and (match := _NVJET.search(name)):
        columns, rows, depth, stages, wide, tall = map(int, match.groups())
        tile, cluster = (columns, rows, depth), (wide, tall)
    elif match := _LDG_STAGES.search(name) or _TILE_AND_STAGES.search(name):
        columns, rows, depth, stages = map(int, match.groups())
        tile = (columns, rows, depth)
    elif match := _TILE.search(name):
        tile = tuple(int(part) if part else None for part in match.groups())
    align = _ALIGN.search(name)
    return Kernel(
        name=name,
        arch=_arch(name),
        tile_m=tile[1],
        tile_n=tile[0],
        tile_k=tile[2],
        stages=stages,
        cluster=cluster,
        align=int(align[1]) if align else None,
        split_k=bool(_SPLIT.search(name)),
    )


def _arch(name: str) -> int | None:
    for pattern in _ARCH:
        match = pattern.search(name)
        if match:
            return int(match[1])
    return next((arch for word, arch in _FAMILIES.items() if word in name), None)


def main_kernel(names: Sequence[str]) -> Kernel | None:
    """The kernel that multiplies, among all kernels of a call. The others reduce or copy."""
    products = [name for name in names if not _HELPERS.search(name.partition("<")[0])]
    chosen = next(iter(products or names), None)
    if chosen is None:
        return None
    kernel = parse(chosen)
    if any(re.search("reduce", name, re.IGNORECASE) for name in names if name != chosen):
        return Kernel(**{**vars(kernel), "split_k": True})
    return kernel


def names_of(gemms: Sequence[Gemm], device: torch.device) -> dict[Gemm, tuple[str, ...]]:
    """The kernels that each product runs, in order. Empty on a CPU.

    Call this after timing, because a profiler may slow what runs later. The library's heuristics
    choose the same kernels at any time.
    """
    if device.type != "cuda":
        return {}
    names: dict[Gemm, tuple[str, ...]] = {}
    batch: list[Prepared] = []
    held = 0
    for gemm in dict.fromkeys(gemms):
        try:
            batch.append(prepare(gemm, device, 1))
        except errors.PytracerError:
            continue  # it ran before, so memory is short now; its kernel stays unknown
        held += bytes_of(gemm, 1)
        if len(batch) == _MOST_AT_ONCE or held > _MOST_BYTES_AT_ONCE:
            names |= _profiled(batch)
            batch, held = [], 0
    return names | _profiled(batch)


def _profiled(batch: Sequence[Prepared]) -> dict[Gemm, tuple[str, ...]]:
    """One profile of many products, with a waiting kernel before each as a marker."""
    if not batch:
        return {}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for prepared in batch:
            private_torch.wait_on_gpu(1000)
            with as_asked(prepared.work):
                prepared.calls[0]()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    groups = split_at_markers([str(event.name) for event in events])
    if len(groups) != len(batch):
        return {}  # a marker is missing, and nobody knows which
    return {
        prepared.work: names
        for prepared, names in zip(batch, groups, strict=True)
        if isinstance(prepared.work, Gemm)
    }


def split_at_markers(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The kernels between each marker and the next."""
    groups: list[list[str]] = []
    for name in names:
        if "spin_kernel" in name:
            groups.append([])
        elif groups and not name.startswith(("Memset", "Memcpy")):
            groups[-1].append(name)
    return [tuple(group) for group in groups]
