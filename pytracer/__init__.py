"""Where a training step's memory went: to the byte, by category, module, op and line.

from pytracer import trace

with trace():
    train_step(batch)
"""

from pytracer.api import LoadedTrace, load, trace
from pytracer.version import __version__

__all__ = ["LoadedTrace", "__version__", "load", "trace"]
