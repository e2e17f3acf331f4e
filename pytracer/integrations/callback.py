"""The part that all frameworks' callbacks share: traces a few steps, and explains failures."""

import inspect
import sys
from pathlib import Path
from typing import Any, TypeVar

from pytracer import errors
from pytracer.basics import environment
from pytracer.capture.cycles import NOT_WATCHED, Recording
from pytracer.data.step_totals import StepRow
from pytracer.integrations import scalars
from pytracer.recording.api import free_name, is_out_of_memory, trace

_T = TypeVar("_T")


def shows_options(kind: type[_T]) -> type[_T]:
    """Adds the options of `Callback` to the signature and docstring of a framework's callback."""
    own = inspect.signature(kind).parameters.values()
    shared = inspect.signature(Callback).parameters.values()
    all_ = [*(one for one in own if one.kind is not one.VAR_KEYWORD), *shared]
    kind.__signature__ = inspect.Signature(all_)  # type: ignore[attr-defined]
    kind.__doc__ = f"{kind.__doc__}\n\n    Args:{(Callback.__doc__ or '').partition('Args:')[2]}"
    return kind


class Callback:
    """Keeps and shows the first steps of a training, and watches the others.

    Args:
        steps: number of steps to keep.
        skip: number of steps before those.
        path: write the trace there, one file per rank (run.rank3.pytrace).
        watch: also trace later steps, 20 at a time and at little cost, to explain a failure for
            lack of memory.
        table: show the table on rank 0, and a page if memory runs out.
        writer: a TensorBoard SummaryWriter to log to. W&B, MLflow, Prometheus and OpenTelemetry get
            the figures if the program has imported them.
        log: a file that gets a JSON line for each kept step; with `always`, for each step.
        always: instead of all that, be always on: True, or the folder to make. See docs/always.md.
        every: with `always`, after how many steps the figures are sent.
        **options: options of `pytracer.trace`: stacks, detail, devices, ...
    """

    def __init__(
        self,
        *,
        steps: int = 3,
        skip: int = 0,
        path: str | Path | None = None,
        watch: bool = True,
        table: bool = True,
        writer: Any = None,
        log: str | Path | None = None,
        always: bool | str | Path = False,
        every: int = 1,
        **options: Any,
    ) -> None:
        """Does not record until `begin`."""
        self._steps, self._skip, self._watch = steps, skip, watch
        self._path = None if path is None else environment.file_of_rank(Path(path))
        self._table, self._writer, self._log, self._options = table, writer, log, options
        self._always, self._every = always, every
        self._recorder: Any = None  # that is always on
        self._recording: Recording | None = None
        self._untold: Any = None  # a trace whose figures no framework has asked for
        self._new: dict[str, float] = {}
        self._attempt = 0
        self._file: Path | None = None  # of this attempt
        self.trace: trace | None = None  # of the kept steps, once they are over

    def begin(self, *targets: Any) -> None:
        """Call this when the training starts, or starts again after a failed attempt."""
        self.end()
        if self._always:
            self._begin_always(*targets)
            return
        self._file = None if self._path is None else self._attempts_path(self._path)
        keep = {} if self._file is None else {"path": self._file}
        self._attempt += 1
        self._recording = Recording(
            lambda **more: trace(*targets, **more),
            skip=self._skip,
            steps=self._steps,
            watch=self._watch,
            options=self._options,
            keep=keep,
            ready=self._ready,
            problem=errors.warn,
        )
        self._recording.begin()

    def stepped(self) -> None:
        """Call this after each step of the optimizer."""
        if self._recording is not None:
            self._recording.stepped()

    def end(self, error: BaseException | None = None) -> None:
        """Call this when the training is over, or has failed with `error`."""
        recording, self._recording = self._recording, None
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.end(error)
        if recording is None:
            return
        recording.end(error)
        if error is not None and recording.last is not None:
            self.trace = recording.last
            if not self._table or not is_out_of_memory(error):
                return
            if recording.rests:
                self._say(f"{NOT_WATCHED}. A larger `steps` keeps more of them")
            else:
                path = free_name("pytracer-oom")
                self._say(f"{recording.last.post_mortem()}\nsaved     {recording.last.save(path)}")

    def new_scalars(self) -> dict[str, float]:
        """The figures for a framework's loggers that nobody has taken yet, if there are any."""
        traced, self._untold = self._untold, None
        new, self._new = self._new, {}
        return new if traced is None else scalars.of(traced)

    def _ready(self, traced: trace) -> None:
        self.trace = self._untold = traced
        if environment.rank() != 0:
            return
        if self._table:
            written = "" if self._file is None else f"\n\nWritten to {self._file}."
            self._say(f"{traced.table()}{written}")
        scalars.log(traced, writer=self._writer)
        if self._log is not None:
            scalars.add_lines(traced, self._log)

    def _begin_always(self, *targets: Any) -> None:
        from pytracer.recording.always import always

        path = Path("pytracer.always" if self._always is True else str(self._always))
        path = self._attempts_path(path)
        self._attempt += 1
        try:
            self._recorder = always(
                path, *targets, each=self._send, every=self._every, **self._options
            ).begin()
        except errors.PytracerError as problem:
            errors.warn(str(problem))

    def _send(self, rows: list[StepRow]) -> None:
        categories = {} if self._recorder is None else self._recorder.categories
        if rows:
            _, self._new = scalars.of_step(rows, categories)
        if environment.rank() == 0:
            scalars.log_step(rows, writer=self._writer, categories=categories)
            if self._log is not None:
                scalars.add_line_of_step(rows, self._log)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"\n{text}\n")

    def _attempts_path(self, path: Path) -> Path:
        return (
            path.with_name(f"{path.stem}.{self._attempt}{path.suffix}") if self._attempt else path
        )
