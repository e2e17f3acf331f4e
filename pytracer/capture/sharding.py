"""How a model is spread over the ranks: its wrappers, and what this rank has of each parameter.

Read from the types of modules and from DTensors, never from names. Nothing is imported: a program
that spreads its model has imported what it uses.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pytracer.capture import deepspeed
from pytracer.capture.looking import modules_of, parameters_of
from pytracer.data._native import C

# Classes by the module of torch that has them, and what people call them.
_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", "DDP"),
    ("torch.nn.parallel", "DataParallel", "DataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "FSDP1"),
    ("torch.distributed.fsdp", "FSDPModule", "FSDP2"),
)


_MOST_PARAMETERS = 100_000  # of which each is listed


def of(roots: Iterable[torch.nn.Module], name_of: Callable[[torch.Tensor], str]) -> dict[str, Any]:
    """The document of these models; `meta.Sharding` describes it."""
    models = list(roots)
    shares: dict[str, list[int]] = {}
    parameters = []
    for parameter in _once(parameters_of(models)):
        how, over = _placement(parameter)
        local = sum(part.numel() * part.element_size() for part in C.parts_of(parameter))
        whole = parameter.numel() * parameter.element_size() if how else local
        if how:
            share = shares.setdefault(how, [0, 0])
            share[0] += local
            share[1] += whole
        parameters.append(
            {
                "name": name_of(parameter),
                "how": how,
                "over": over,
                "local_bytes": local,
                "global_bytes": whole,
            }
        )
    return {
        "wrappers": sorted(_wrappers(models)),
        "shares": [
            {"how": how, "local_bytes": local, "global_bytes": whole}
            for how, (local, whole) in shares.items()
        ],
        "parameters": parameters[:_MOST_PARAMETERS],
    }


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


def _placement(parameter: torch.Tensor) -> tuple[str, str]:
    """A DTensor's placements over its mesh ("cut along 0 over shard=4"), and what cuts it ("shard")."""
    kind = _class("torch.distributed.tensor", "DTensor")
    if kind is None or type(parameter) is not kind:
        return "", ""
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or [f"dim{number}" for number in range(mesh.ndim)]
    placed = list(zip(parameter.placements, names, strict=False))  # type: ignore[attr-defined]
    how = ", ".join(
        f"{_in_words(placement)} over {name}={mesh.size(number)}"
        for number, (placement, name) in enumerate(placed)
    )
    cuts = (name for placement, name in placed if not placement.is_replicate())
    return how, " x ".join(cuts)


def _in_words(placement: Any) -> str:
    if placement.is_replicate():
        return "whole"
    if placement.is_partial():
        return "part of a sum"
    return f"cut along {placement.dim}"
