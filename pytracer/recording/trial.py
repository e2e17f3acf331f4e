"""Tries a plan on an unchanged program: checkpoints and offloads modules as they are called.

A wrong name is an error. Nothing is changed before each name is known to be a module of a model that
the program has; a program without one of them ends before its first optimizer step.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from pytracer import errors
from pytracer.capture.labels import paths_in, unwrapped
from pytracer.capture.looking import is_a, submodules_of
from pytracer.data.model_names import in_code, module_text
from pytracer.recording.offload import offload
from pytracer.recording.start import safely

_MOST_NAMES = 8  # in a message
_NO_EFFECT = {
    "--checkpoint": "not called with gradients",
    "--offload": "kept nothing on a GPU for its backward",
}


class _Change:
    """What an option asks for: a module by its name, or several by a pattern."""

    def __init__(self, option: str, name: str) -> None:
        self.option, self.name = option, name
        self.is_applied = self.had_effect = False

    def __str__(self) -> str:
        return f"{self.option} {self.name}"

    @property
    def no_effect(self) -> str:
        """A sentence for a change that came to nothing."""
        return f"{self}: {_NO_EFFECT[self.option]}"

    def why_useless(self, model: "_Model") -> str:
        """Why a change of these modules would change nothing; "" if it changes something."""
        for path, module in model.found(self.name):
            if is_a(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
                first = next(iter(submodules_of(module)), "0")
                kind, member = type(module).__name__, module_text(f"{path}.{first}")
                return f"{self}: a {kind} is not called; name its members, as in {member}"
        if self.option == "--offload" and torch.version.cuda is None and torch.version.hip is None:
            return f"{self}: it keeps nothing on a GPU, and there is none here"
        return ""

    def apply(self, module: torch.nn.Module) -> None:
        """Changes what a call of the module does."""
        if self.option == "--offload":
            offload(module, when_moved=self._note_effect)
        else:
            self._checkpoint(module)

    def _checkpoint(self, module: torch.nn.Module) -> None:
        forward = partial(checkpoint, module.forward, use_reentrant=False)

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self.had_effect = True  # only written: what compiled code reads, it guards on
            return forward(*args, **kwargs)

        module.forward = checkpointed

    def _note_effect(self) -> None:
        self.had_effect = True


class _Model:
    """An outermost module that was called, or that the program has."""

    def __init__(self, root: torch.nn.Module, number: int) -> None:
        kind = type(unwrapped(root)).__name__
        self.name = kind if number == 1 else f"{kind}#{number}"
        self._modules: Mapping[str, weakref.ref[torch.nn.Module]] = {
            path: weakref.ref(module) for path, module in paths_in(root) if path
        }

    def __bool__(self) -> bool:
        """Whether it has modules inside: a loss and an activation have none."""
        return bool(self._modules)

    def paths(self, name: str) -> list[str]:
        """The paths of the modules that the user calls by this name.

        The model's own name may precede it. `*` stands for any text in one level of the path.
        """
        own = f"{self.name}."
        inside = [name.removeprefix(own)] if name.startswith(own) else []
        wanted = map(in_code, (*inside, name))
        hits = ([path for path in self._modules if _matches(path, each)] for each in wanted)
        return next(filter(None, hits), [])

    def is_named_in(self, name: str) -> bool:
        """Whether the name begins with this model's, and is that of a module in here."""
        return name.startswith(f"{self.name}.") and self.paths(name) != []

    def found(self, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
        """The modules that the user calls by this name and that are still there."""
        for path in self.paths(name):
            module = self._modules[path]()
            if module is not None:
                yield path, module

    def names(self, *, whole: bool) -> list[str]:
        """The names of its modules, with its own in front."""
        own = f"{self.name}." if whole else ""
        return [own + (path if whole else module_text(path)) for path in self._modules]


def _matches(path: str, wanted: str) -> bool:
    if "*" not in wanted:
        return path == wanted
    levels, patterns = path.split("."), [each.replace("[", "[[]") for each in wanted.split(".")]
    return len(levels) == len(patterns) and all(map(fnmatchcase, levels, patterns))


class Trial:
    """Changes the program's modules when a model is called and every name is known."""

    def __init__(
        self,
        checkpoint: Sequence[str],
        offload: Sequence[str],
        *,
        stop: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        """Changes nothing until `begin`.

        Args:
            checkpoint: names of modules to checkpoint.
            offload: names of modules to offload.
            stop: ends the program; gets the reason.
            tell: gets a sentence for the user.
        """
        given = [("--checkpoint", name) for name in checkpoint]
        given += [("--offload", name) for name in offload]
        self._changes = [_Change(*each) for each in dict.fromkeys(given)]
        self._stop, self._tell = stop, tell
        self._models: list[_Model] = []
        self._known: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._hooks: list[Any] = []
        self._is_checked = False

    def begin(self) -> None:
        """Begins to look at the models that the program calls."""
        self._hooks = [
            register_module_forward_pre_hook(self._called),
            register_optimizer_step_pre_hook(self._before_step),
        ]

    def end(self) -> str:
        """Ends the trial. Returns what was wrong with it, or ""."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return self.problem()

    def problem(self) -> str:
        """Why the trial has not changed what it should; "" if it has."""
        if wrong := self._wrong_names(self._models):
            return wrong
        if any(change.had_effect for change in self._changes):
            return ""
        return f"{self._changes[0].no_effect}, so the trial changed nothing"

    def _called(self, module: Any, _: Any) -> None:
        if not self._knows(module):
            safely(self._meet, module)

    def _knows(self, module: torch.nn.Module) -> bool:
        known = self._known.get(id(module))
        return known is not None and known() is module

    def _meet(self, root: torch.nn.Module) -> None:
        model = self._model_of(root)
        if not model:
            return
        self._models.append(model)
        self._known |= {id(found): weakref.ref(found) for _, found in paths_in(root)}
        if any(not change.is_applied for change in self._changes):
            models = self._all_models()
            if not self._wrong_names(models):
                self._apply(models)

    def _model_of(self, root: torch.nn.Module) -> _Model:
        kind = type(unwrapped(root)).__name__
        return _Model(root, 1 + sum(model.name.partition("#")[0] == kind for model in self._models))

    def _apply(self, models: Sequence[_Model]) -> None:
        """Changes the models that were called. A model to come is changed when it is called."""
        done: set[tuple[str, int]] = set()  # patterns may overlap
        for change in self._changes:
            model = self._model_for(change, models)
            if model is None or model not in self._models or change.is_applied:
                continue
            change.is_applied = True
            for _, module in model.found(change.name):
                if (change.option, id(module)) not in done:
                    done.add((change.option, id(module)))
                    change.apply(module)

    def _model_for(self, change: _Change, models: Sequence[_Model]) -> _Model | None:
        """A name without a model's belongs to the first model that has all of those."""
        names = [change.name]
        named = [model for model in models if model.is_named_in(change.name)]
        if not named:
            names = [each.name for each in self._changes]
            names = [name for name in names if not any(m.is_named_in(name) for m in models)]
        return next((m for m in named or models if all(map(m.paths, names))), None)

    def _before_step(self, *_: Any) -> None:
        if self._models and not self._is_checked:  # some optimizers call the model in their step
            self._is_checked = True
            safely(self._check)

    def _check(self) -> None:
        if wrong := self._wrong_names(self._all_models()):
            self._stop(f"{wrong}. Stopped before the first step, and nothing was changed")
        for change in self._changes:
            if change.is_applied and not change.had_effect:
                self._tell(f"{change.no_effect} so far, so nothing changes there")

    def _all_models(self) -> list[_Model]:
        """The models that were called. If these lack a name, also those that the program has."""
        if all(self._model_for(change, self._models) for change in self._changes):
            return self._models
        there = [each for each in gc.get_objects() if is_a(each, torch.nn.Module)]
        inner = {id(found) for root in there for path, found in paths_in(root) if path}
        roots = [root for root in there if id(root) not in inner and not self._knows(root)]
        return [*self._models, *filter(None, map(self._model_of, roots))]

    def _wrong_names(self, models: Sequence[_Model]) -> str:
        """What is wrong with the names in a program with these models; "" if all are right."""
        left = [change for change in self._changes if not change.is_applied]
        missing = [each for each in left if not any(m.paths(each.name) for m in models)]
        if missing:
            return _not_there(missing, self._models or models)
        for change in left:
            model = self._model_for(change, models)
            if model is None:
                first = next(model for model in models if model.paths(change.name))
                return f"{change}: no model has all of these; write {first.name}.{change.name}"
            if useless := change.why_useless(model):
                return useless
        return ""


def _not_there(missing: Sequence[_Change], models: Sequence[_Model]) -> str:
    first = [change.name.partition(".")[0] for change in missing]
    whole = len(models) > 1 or any(model.name in first for model in models)
    names = [name for model in models for name in model.names(whole=whole)]
    similar = [errors.did_you_mean(change.name, names, most=3) for change in missing]
    more = f" and {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES)
    some = (
        f". There are {', '.join(names[:_MOST_NAMES])}{more}" if names and not all(similar) else ""
    )
    asked = "; ".join(f"{change}{one}" for change, one in zip(missing, similar, strict=True))
    return f"the program has no module of this name: {asked}{some}"
