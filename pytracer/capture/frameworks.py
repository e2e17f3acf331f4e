"""The frameworks that the program trains with, and its notebook: hints and lines use their words."""

import inspect
import sys
from types import FrameType
from typing import Any

from pytracer.capture.looking import is_a
from pytracer.data._native import C

# By the name in the trace: where the class is, once the program has imported it. Most telling first:
# the Trainer has an Accelerator, too.
_CLASSES = {
    "transformers.Trainer": ("transformers.trainer", "Trainer"),
    "lightning.Trainer": ("lightning.pytorch.trainer.trainer", "Trainer"),
    "pytorch_lightning.Trainer": ("pytorch_lightning.trainer.trainer", "Trainer"),
    "accelerate.Accelerator": ("accelerate.accelerator", "Accelerator"),
    "transformers.PreTrainedModel": ("transformers.modeling_utils", "PreTrainedModel"),
}
_DEEPEST = 100  # frames; a Trainer is some frames above its optimizer's step


def frameworks_of(frame: FrameType | None) -> list[str]:
    """Returns the frameworks of which variables of the frame and its callers hold an object."""
    classes = {
        name: imported
        for name, (module, attribute) in _CLASSES.items()
        if (imported := _imported(module, attribute)) is not None
    }
    held: set[str] = set()
    for _ in range(_DEEPEST if classes else 0):
        if frame is None:
            break
        own = C.locals_of(frame).values() if frame.f_code.co_flags & inspect.CO_OPTIMIZED else ()
        for value in (*own, *dict.values(frame.f_globals)):
            held.update(name for name, kind in classes.items() if is_a(value, kind))
        frame = frame.f_back
    return [name for name in classes if name in held]


def notebook_cells() -> dict[str, str]:
    """Returns what IPython calls each cell that has run, `In[3]`, by the name of the cell's file."""
    ipython = _imported("IPython.core.interactiveshell", "InteractiveShell")
    shell = None if ipython is None else vars(ipython).get("_instance")
    compiler = C.attributes_of(shell).get("compile") if shell is not None else None
    numbers = C.attributes_of(compiler).get("_filename_map") if compiler is not None else None
    if not is_a(numbers, dict):
        return {}
    return {str(file): f"In[{number}]" for file, number in dict.items(numbers)}


def _imported(module: str, attribute: str) -> type[Any] | None:
    """The class, if the module is loaded; it is neither imported nor asked for an attribute."""
    loaded = sys.modules.get(module)
    kind = vars(loaded).get(attribute) if loaded is not None else None
    return kind if isinstance(kind, type) else None
