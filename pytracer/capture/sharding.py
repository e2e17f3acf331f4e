"""How a model is spread over the ranks: its wrappers, and what this rank has of each parameter.

Read from the types of modules and from DTensors, never from names. Nothing is imported: a program
that spreads its model has imported what it uses.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch

from pytracer._native import C
from pytracer.capture import deepspeed
from pytracer.capture.looking import modules_of, parameters_of

# Classes by the module of torch that has them, and what people call them.
_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", "DDP"),
    ("torch.nn.parallel", "DataParallel", "DataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "FSDP1"),
    ("torch.distributed.fsdp", "FSDPModule", "FSDP2"),
)


def of(roots: Iterable[torch.nn.Module]) -> dict[str, Any]:
    """The document of these models; `meta.Sharding` describes it."""
    models = list(roots)
    shares: dict[str, list[int]] = {}
    for parameter in _once(parameters_of(models)):
        if (how := _placement(parameter)) is not None:
            share = shares.setdefault(how, [0, 0])
            share[0] += sum(part.numel() * part.element_size() for part in C.parts_of(parameter))
            share[1] += parameter.numel() * parameter.element_size()
    return {
        "wrappers": sorted(_wrappers(models)),
        "shares": [
            {"how": how, "local_bytes": local, "global_bytes": whole}
            for how, (local, whole) in shares.items()
        ],
    }


def place_in_job() -> tuple[int, int] | None:
    """The process's rank and the number of ranks; None before the program has told torch."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _once(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """The tensors, a shared one once."""
    return {id(tensor): tensor for tensor in tensors}.values()


def _wrappers(models: list[torch.nn.Module]) -> set[str]:
    kinds = {title: _class(where, name) for where, name, title in _WRAPPERS}
    loaded = {title: kind for title, kind in kinds.items() if kind is not None}
    found = set()
    for module in modules_of(models):
        found |= {title for title, kind in loaded.items() if issubclass(type(module), kind)}
        if stage := deepspeed.zero_stage(module):
            found.add(stage)
    return found


def _class(module: str, name: str) -> type | None:
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def _placement(parameter: torch.Tensor) -> str | None:
    """A DTensor's placements with the sizes of its mesh: "Shard(0) over fsdp=4"."""
    kind = _class("torch.distributed.tensor", "DTensor")
    if kind is None or type(parameter) is not kind:
        return None
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or [f"dim{number}" for number in range(mesh.ndim)]
    sizes = (mesh.size(number) for number in range(mesh.ndim))
    placed = parameter.placements  # type: ignore[attr-defined]
    return ", ".join(
        f"{_in_words(placement)} over {name}={size}"
        for placement, name, size in zip(placed, names, sizes, strict=False)
    )


def _in_words(placement: Any) -> str:
    if placement.is_replicate():
        return "whole"
    if placement.is_partial():
        return "part of a sum"
    return f"cut along {placement.dim}"
