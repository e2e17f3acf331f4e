"""Where a training step's memory went: to the byte, by category, module, op and line.

from pytracer import trace

with trace():
    train_step(batch)
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pytracer.version import __version__

if TYPE_CHECKING:
    from pytracer.api import trace
    from pytracer.imagined.run import imagine, is_imagining
    from pytracer.reading import LoadedTrace, load

__all__ = ["LoadedTrace", "__version__", "imagine", "is_imagining", "load", "trace"]


class _Package(ModuleType):
    """Imports torch only when something is asked for that needs it.

    Reading a trace does not. `pytracer run` must not: a program may set the environment before its
    own `import torch`.
    """

    @property
    def trace(self) -> Any:
        """The class, though a submodule has the same name."""
        from pytracer.api import trace

        return trace

    @trace.setter
    def trace(self, submodule: ModuleType) -> None:
        """Importing the submodule would put it in the class's place."""


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in ("LoadedTrace", "load"):
        from pytracer import reading

        return getattr(reading, name)
    if name in ("imagine", "is_imagining"):
        from pytracer.imagined import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "load_ipython_extension"]


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext pytracer`."""
    from pytracer.integrations.ipython import register

    register(shell)
