"""A job as a Parquet dataset: a folder per rank (`rank=3/`), each with the rank's digest.

A file has one row. Its columns are the fields of `Digest`: numbers, texts, and lists of records.
Each rank can write its own folder, so nothing central computes. Every tool that reads Parquet reads
it; `query` asks DuckDB. docs/ranks.md describes the columns.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from pytracer import errors
from pytracer.basics.files import write_whole
from pytracer.ranks.digest import Digest

if TYPE_CHECKING:
    import pandas as pd

_FILE = "digest.parquet"
_FORMAT = {b"pytracer_digest": b"2"}  # the file's metadata
_FOLDER = re.compile(r"rank=(\d{1,9})")

# What `query` calls the records: a view for each kind of them.
_OF_STEPS = (
    "SELECT rank, generate_subscripts(steps, 1) - 1 AS step, unnest(steps) AS it FROM digests"
)
_VIEWS = {
    "ranks": "SELECT rank, status, host, part, peak, reserved, growth_per_step, file FROM digests",
    "steps": "SELECT rank, step, it.peak, it.duration_ns, it.forward_ns, it.growth "
    f"FROM ({_OF_STEPS})",
    "categories": "SELECT rank, unnest(map_keys(at_peak)) AS category, "
    "unnest(map_values(at_peak)) AS bytes FROM digests",
    "step_categories": "SELECT rank, step, unnest(map_keys(it.by_category)) AS category, "
    f"unnest(map_values(it.by_category)) AS bytes FROM ({_OF_STEPS})",
    "owners": "SELECT rank, peak_step AS step, unnest(holders, recursive := true) FROM digests",
    "findings": "SELECT rank, unnest(notes, recursive := true) FROM digests",
    "ledger": "SELECT rank, unnest(ledger, recursive := true) FROM digests",
    "collectives": "SELECT rank, unnest(entered, recursive := true) FROM digests",
}


def is_dataset(path: str | Path) -> bool:
    """Whether the folder is a dataset that `write` made."""
    return next(Path(path).glob(f"rank=*/{_FILE}"), None) is not None


def write(digests: Iterable[Digest], folder: str | Path, *, overwrite: bool = False) -> Path:
    """Writes a folder per rank. Other ranks' folders stay, so ranks may write side by side.

    Raises:
        errors.PytracerError: pyarrow is not installed.
        errors.CannotWrite: a rank's file exists already, or cannot be written.
    """
    parquet = _parquet()
    target = Path(folder)
    for one in digests:
        place = target / f"rank={one.rank}"
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = os.strerror(error.errno or 5)
            raise errors.CannotWrite(f"{folder} cannot be written to: {reason}") from None
        table = table_of(one)

        def fill(file: Any, table: Any = table) -> None:
            # A file of one row: what Parquet may add to each column takes more than the figures.
            lean = {"store_schema": False, "use_dictionary": False, "write_statistics": False}
            with parquet.ParquetWriter(file, table.schema, compression="zstd", **lean) as writer:
                writer.write_table(table)
                writer.add_key_value_metadata(_FORMAT)

        write_whole(place / _FILE, fill, overwrite=overwrite)
    return target


def read(folder: str | Path) -> list[Digest]:
    """The digests of all ranks in the folder.

    Raises:
        errors.UnreadableTrace: a file is no digest of ours, or of a newer version.
    """
    parquet = _parquet()
    digests = []
    for file in sorted(Path(folder).glob(f"rank=*/{_FILE}")):
        found = _FOLDER.fullmatch(file.parent.name)
        if found is None:
            continue
        try:
            stored = parquet.ParquetFile(file)
            table = stored.read()
        except (OSError, ValueError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            digests.append(
                Digest(int(found[1]), status="unreadable", file=str(file), problem=f"{file}: {why}")
            )
            continue
        is_ours = _FORMAT.items() <= (stored.metadata.metadata or {}).items()
        if not is_ours or not table.schema.equals(_schema()) or table.num_rows != 1:
            raise errors.UnreadableTrace(
                f"{file} is not a digest that this version reads: write the dataset again"
            )
        digests.append(digest_of(int(found[1]), table))
    return digests


def query(folder: str | Path, sql: str) -> "pd.DataFrame":
    """Runs a question in DuckDB, in this process. The tables are `digests`, and the views of it.

    Raises:
        errors.PytracerError: DuckDB is not installed.
        errors.UsageError: DuckDB does not understand the question.
    """
    try:
        import duckdb
    except ImportError:
        raise errors.PytracerError("query needs DuckDB: pip install duckdb") from None
    if not is_dataset(folder):
        raise errors.UsageError(
            f"{folder} is not a dataset: make one with pytracer export FOLDER -o {folder}/"
        )
    files = f"{folder}/rank=*/{_FILE}".replace("'", "''")
    try:
        with duckdb.connect() as connection:
            # A table, and not a view: a join of two views would open every file twice.
            connection.execute(
                "CREATE TEMP TABLE digests AS "
                f"SELECT * FROM read_parquet('{files}', hive_partitioning=true)"
            )
            for name, view in _VIEWS.items():
                connection.execute(f"CREATE VIEW {name} AS {view}")
            answer = connection.execute(sql)
            if answer is None:
                raise errors.UsageError("the question is empty: write one SELECT")
            return answer.df()
    except duckdb.Error as error:
        raise errors.UsageError(f"DuckDB: {error}") from None


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise errors.PytracerError("Parquet needs pyarrow: pip install pyarrow") from None
    return parquet


def table_of(one: Digest) -> Any:
    """The digest as an Arrow table of one row. Its rank is the name of its folder."""
    import pyarrow as pa

    return pa.Table.from_pylist([_as_record(one)], _schema())


def digest_of(rank: int, table: Any) -> Digest:
    """The digest that `table_of` made this table of."""
    (record,) = table.to_pylist()
    return Digest(rank=rank, **{name: _as(kind, record[name]) for name, kind in _columns(Digest)})


def _columns(kind: type) -> Iterator[tuple[str, Any]]:
    """The fields of a digest, or of a record in it, with their types."""
    hints = get_type_hints(kind)
    return ((name, hint) for name, hint in hints.items() if name != "rank")


@cache
def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(_fields(Digest))


def _fields(kind: type) -> list[Any]:
    """The columns of a table, or of a record. A file that has them has a value wherever one must be."""
    import pyarrow as pa

    return [
        pa.field(name, _arrow(each), nullable=each == int | None) for name, each in _columns(kind)
    ]


def _arrow(kind: Any) -> Any:
    import pyarrow as pa

    if kind is str:
        return pa.string()
    if kind in (int, int | None):
        return pa.int64()
    if get_origin(kind) is Mapping:
        return pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))
    if get_origin(kind) is tuple:
        return pa.list_(pa.field("element", _arrow(get_args(kind)[0]), nullable=False))
    return pa.struct(_fields(kind))


def _as_record(value: Any) -> Any:
    """Numbers, texts, lists and dictionaries, as Arrow takes them."""
    if isinstance(value, Digest):
        return {name: _as_record(getattr(value, name)) for name, _ in _columns(Digest)}
    if isinstance(value, Mapping):
        return list(value.items())
    if hasattr(value, "_fields"):
        return {name: _as_record(each) for name, each in value._asdict().items()}
    return [_as_record(each) for each in value] if isinstance(value, tuple) else value


def _as(kind: Any, value: Any) -> Any:
    """The way back from `_as_record`, for a value of this type."""
    if kind in (str, int, int | None):
        return value
    if get_origin(kind) is Mapping:
        return dict(value)
    if get_origin(kind) is tuple:
        return tuple(_as(get_args(kind)[0], each) for each in value)
    return kind(**{name: _as(each, value[name]) for name, each in _columns(kind)})
