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
    from pytracer.reading.job import Job
    from pytracer.reading.loading import load
    from pytracer.reading.views import LoadedTrace
    from pytracer.recording.api import trace

__all__ = [
    "Job",
    "LoadedTrace",
    "__version__",
    "imagine",
    "is_imagining",
    "largest_batch",
    "load",
    "trace",
]


def __getattr__(name: str) -> "Any":
    """Imports torch only for what needs it.

    Reading a trace does not. `pytracer run` must not: a program may set the environment before its
    own `import torch`.
    """
    if name == "trace":
        from pytracer.recording.api import trace

        return trace
    if name == "LoadedTrace":
        from pytracer.reading.views import LoadedTrace

        return LoadedTrace
    if name == "Job":
        from pytracer.reading.job import Job

        return Job
    if name == "load":
        from pytracer.reading.loading import load

        return load
    if name in ("imagine", "is_imagining"):
        from pytracer.imagined import run

        return getattr(run, name)
    if name == "largest_batch":
        from pytracer.imagined.search import largest_batch

        return largest_batch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "load_ipython_extension"]


def load_ipython_extension(shell: "Any") -> None:
    """`%load_ext pytracer`."""
    from pytracer.integrations.ipython import register

    register(shell)
