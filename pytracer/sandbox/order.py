"""What a private view of the files is asked for, and the problem that one may have."""

from collections.abc import Mapping
from dataclasses import dataclass

VIEW = "PYTRACER_VIEW"  # this variable is set in a program that has a view, and in its children


@dataclass(frozen=True)
class Order:
    """A command, and what it may touch. It is handed over as JSON."""

    command: list[str]
    ways: list[str]  # to make a view, in the order in which they are tried
    folder: str  # an empty one, for the view
    outputs: list[str]  # folders that the command shares with everybody
    report: str  # the file for what happened
    problem: str  # the command makes this file if it fails
    network: bool  # whether the command sees the machine's network
    write: bool  # whether its changes are made for real at the end


class Impossible(Exception):
    """This machine does not allow such a view. The text says what failed."""


def quiet(environment: Mapping[str, str], *, network: bool) -> dict[str, str]:
    """Variables that keep loggers and hubs from trying what would be refused."""
    offline = {} if network else {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    given = {name: environment.get(name, text) for name, text in offline.items()}
    return {"WANDB_MODE": "disabled", **given}
