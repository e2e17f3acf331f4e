"""Where the files of ranks are reduced to digests: in this process, or in Dask's workers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.ranks.digest import Digest

Map = Callable[[Callable[[Path], Digest], Iterable[Path]], Iterable[Digest]]


@contextmanager
def opened(engine: str | None) -> Iterator[Map]:
    """A function like `map`: None is this process, "dask" a cluster on this machine.

    Anything else is the address of a scheduler of Dask's, "tcp://10.0.0.1:8786". Its workers need
    pytracer, and must see the files under the same names.

    Raises:
        errors.PytracerError: Dask is not installed.
        errors.UsageError: nobody answers at the address.
    """
    if engine is None:
        yield map
        return
    try:
        from dask import distributed
    except ImportError:
        raise errors.PytracerError("--engine needs Dask: pip install 'dask[distributed]'") from None
    start: Any = distributed.Client
    where = {} if engine == "dask" else {"address": engine}
    try:
        client = start(**where, set_as_default=False, timeout=10)
    except (OSError, ValueError) as error:
        raise errors.UsageError(f"--engine {engine}: no scheduler answers there: {error}") from None
    with client:
        yield _Dask(client)


class _Dask:
    def __init__(self, client: Any) -> None:
        self._client = client

    def __call__(
        self, function: Callable[[Path], Digest], files: Iterable[Path]
    ) -> Iterable[Digest]:
        """Reduces each file in a worker. The digests come back in the order of the files."""
        absolute = [Path(file).resolve() for file in files]
        found: list[Digest] = self._client.gather(self._client.map(function, absolute, pure=False))
        return found
