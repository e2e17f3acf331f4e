"""Where a training step's memory went: to the byte, by category, module, op and line.

from pytracer import trace

with trace():
    train_step(batch)
"""

from pytracer.basics.version import __version__

TYPE_CHECKING = (
    False  # `typing` would be imported before the program: see pytracer/recording/start.py
)
if TYPE_CHECKING:
    from typing import Any

    from pytracer.imagined.run import imagine, is_imagining
    from pytracer.imagined.search import largest_batch
    from pytracer.reading.history import History
    from pytracer.reading.job import Job
    from pytracer.reading.loading import load
    from pytracer.reading.views import LoadedTrace
    from pytracer.recording.always import always
    from pytracer.recording.api import trace

__all__ = [
    "History",
    "Job",
    "LoadedTrace",
    "__version__",
    "always",
    "imagine",
    "is_imagining",
    "largest_batch",
    "load",
    "trace",
]


_MODULES = {
    "History": "pytracer.reading.history",
    "Job": "pytracer.reading.job",
    "LoadedTrace": "pytracer.reading.views",
    "always": "pytracer.recording.always",
    "imagine": "pytracer.imagined.run",
    "is_imagining": "pytracer.imagined.run",
    "largest_batch": "pytracer.imagined.search",
    "load": "pytracer.reading.loading",
    "trace": "pytracer.recording.api",
}


def __getattr__(name: str) -> "Any":
    """Imports torch only for what needs it.

    Reading a trace does not. `pytracer run` must not: a program may set the environment before its
    own `import torch`.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(__import__(_MODULES[name], fromlist=["_"]), name)


def __dir__() -> list[str]:
    return [*__all__, "load_ipython_extension"]


def load_ipython_extension(shell: "Any") -> None:
    """`%load_ext pytracer`."""
    from pytracer.integrations.ipython import register

    register(shell)
