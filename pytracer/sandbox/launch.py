"""Runs a command that changes no file of the user's and sends nothing, in the best way there is."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.sandbox.order import VIEW, Order, quiet
from pytracer.sandbox.written import Change

UNPROTECTED = "--unprotected"  # the option that does without a view
ALLOW_NETWORK = "--allow-network"
WAYS = ["namespaces", "preload"]  # in the order in which they are tried

_ENTER = f"""import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pytracer.sandbox.enter import main
sys.exit(main())"""


@dataclass(frozen=True)
class Wish:
    """What the user allows."""

    network: bool = False  # connections to other machines
    write: bool = False  # make the program's changes for real, after a run without a problem
    unprotected: bool = False  # run without a view


@dataclass(frozen=True)
class Ran:
    """How the command ended, and what it changed in its view."""

    returncode: int
    stderr: str
    way: str  # one of WAYS; "" if it ran unprotected
    changes: tuple[Change, ...] = ()
    kept: bool = False  # whether the changes were made for real


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    wish: Wish,
    outputs: Sequence[Path] = (),
    problem: Path | None = None,
) -> Ran:
    """Runs the command in a private view of the files.

    Args:
        command: the program and its arguments.
        environment: its environment.
        wish: what the user allows.
        outputs: folders that the command really writes to.
        problem: a file that the command makes if it fails.

    Raises:
        errors.CaptureError: this machine allows none of the ways.
    """
    variables = {**environment, **quiet(environment, network=wish.network)}
    if wish.unprotected:
        done = _plain(command, {**variables, VIEW: "unprotected"})
        return Ran(done.returncode, done.stderr, "")
    with tempfile.TemporaryDirectory(prefix="pytracer-") as folder:
        order = Order(
            command=list(command),
            ways=WAYS if sys.platform == "linux" else [],
            folder=f"{folder}/view",
            outputs=[str(one.resolve()) for one in outputs],
            report=f"{folder}/report",
            problem=str(problem or ""),
            network=wish.network,
            write=wish.write,
        )
        Path(order.folder).mkdir()
        done = _plain([sys.executable, "-ISc", _ENTER, json.dumps(vars(order))], variables)
        report = Path(order.report)
        if not report.exists():
            raise errors.CaptureError(f"the private view has failed: {done.stderr.strip()[-300:]}")
        answer = json.loads(report.read_text())
    if "way" not in answer:
        reasons = "; ".join(f"{way}: {why}" for way, why in answer["impossible"].items())
        raise errors.CaptureError(
            "this machine allows no private view of the files, so the program might overwrite "
            f"yours ({reasons}); run it all the same with {UNPROTECTED}"
        )
    changes = tuple(Change(**one) for one in answer["changes"])
    return Ran(done.returncode, done.stderr, answer["way"], changes, answer.get("kept", False))


def _plain(command: Sequence[str], environment: Mapping[str, str]) -> Any:
    return subprocess.run(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
