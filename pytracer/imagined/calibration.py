"""Measures the card at hand, keeps it, and describes it to imagined runs afterwards.

`pytracer doctor --calibrate` writes the file. Each entry is a card: the driver's figures, the bytes
that CUDA's context and libraries take beside torch's allocator, and cuBLAS's workspace.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytracer import errors

_SECONDS = 120
_WHOLE = ("capacity", "processors", "beside", "cublas_workspace")


@dataclass(frozen=True)
class Measured:
    """A card that was measured here. Sizes are bytes."""

    title: str
    capability: tuple[int, int]
    capacity: int
    processors: int
    beside: int
    cublas_workspace: int
    torch: str
    date: str

    @property
    def source(self) -> str:
        """Where the figures come from."""
        return f"measured on {self.date} by pytracer doctor --calibrate, torch {self.torch}"


def file() -> Path:
    """Where measured cards are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "pytracer" / "cards.json"


def kept() -> dict[str, Measured]:
    """The measured cards by title. A file that cannot be read has none."""
    try:
        document = json.loads(file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = document.get("cards") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        return {}
    cards = [_card(one) for one in entries if isinstance(one, dict)]
    return {card.title: card for card in cards if card is not None}


def _card(entry: dict[str, Any]) -> Measured | None:
    words = [entry.get(name) for name in ("title", "torch", "date")]
    whole = [entry.get(name) for name in _WHOLE]
    capability = entry.get("capability")
    if not all(isinstance(one, str) and one for one in words):
        return None
    if not all(type(one) is int and one >= 0 for one in whole):
        return None
    if not isinstance(capability, list) or [type(one) for one in capability] != [int, int]:
        return None
    return Measured(**{**entry, "capability": tuple(capability)})


def measure() -> Measured:
    """Measures the first visible card in another process, and keeps the result.

    Raises:
        errors.CaptureError: there is no CUDA device, or the measurement failed.
    """
    from pytracer.capture import probe

    probed = probe.measure()
    command = [
        sys.executable,
        "-c",
        "from pytracer.imagined import calibration; calibration.child()",
    ]
    child = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    try:
        found = json.loads(child.stdout)
    except ValueError:
        reason = (child.stderr.strip().splitlines() or ["it printed no reason"])[-1]
        raise errors.CaptureError(f"the card cannot be measured: {reason}") from None
    last = probed["stages"][-1]
    beside = last["process_bytes"] or last["device_bytes"]
    entry = {**found, "beside": beside, "date": time.strftime("%Y-%m-%d")}
    card = _card(entry)
    if card is None:
        raise errors.CaptureError(f"the card says something odd of itself: {entry}")
    _keep(card)
    return card


def child() -> None:
    """Runs in the other process: writes what torch says of the card to its standard output."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    x = torch.ones(512, 512, device="cuda:0")
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    y = x @ x
    workspace = torch.cuda.memory_stats()["requested_bytes.all.current"] - before - y.nbytes
    document = {
        "title": properties.name,
        "capability": [properties.major, properties.minor],
        "capacity": torch.cuda.mem_get_info()[1],
        "processors": properties.multi_processor_count,
        "cublas_workspace": workspace,
        "torch": str(torch.__version__),
    }
    os.write(1, json.dumps(document).encode())


def _keep(card: Measured) -> None:
    cards = {**kept(), card.title: card}
    path = file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(
            json.dumps({"cards": [vars(one) for one in cards.values()]}, indent=1), encoding="utf-8"
        )
        fresh.replace(path)
    except OSError as problem:
        raise errors.CaptureError(f"cannot keep the card in {path}: {problem.strerror}") from None
