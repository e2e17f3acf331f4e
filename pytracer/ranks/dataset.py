"""A job as a Parquet dataset: a folder per rank (`rank=3/`), each with the rows of its digest.

Each rank can write its own folder, so nothing central computes. Every tool that reads Parquet reads
it; `query` asks DuckDB. docs/ranks.md describes the columns.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytracer import errors
from pytracer.files import write_whole
from pytracer.ranks import digest
from pytracer.ranks.digest import Digest, Row

if TYPE_CHECKING:
    import pandas as pd

_FILE = "digest.parquet"
_VERSION = b"pytracer_digest"  # of the schema's metadata
_FOLDER = re.compile(r"rank=(\d{1,9})")

# What `query` calls the rows: a view for each kind of them.
_VIEWS = {
    "ranks": "SELECT rank, max(text) FILTER (name = 'status') AS status, "
    "max(text) FILTER (name = 'host') AS host, max(text) FILTER (name = 'part') AS part, "
    "max(bytes) FILTER (name = 'peak') AS peak, max(bytes) FILTER (name = 'reserved') AS reserved, "
    "max(bytes) FILTER (name = 'growth_per_step') AS growth_per_step, "
    "max(text) FILTER (name = 'file') AS file FROM facts WHERE fact = 'rank' GROUP BY rank",
    "steps": "SELECT rank, step, bytes AS peak, ns AS duration_ns FROM facts "
    "WHERE fact = 'step' AND name = 'peak'",
    "categories": "SELECT rank, category, bytes FROM facts WHERE fact = 'category'",
    "step_categories": "SELECT rank, step, category, bytes FROM facts "
    "WHERE fact = 'step' AND name = 'category'",
    "owners": "SELECT rank, step, category, module, op, line, bytes FROM facts WHERE fact = 'owner'",
    "findings": "SELECT rank, name AS kind, module, line, bytes, text FROM facts "
    "WHERE fact = 'finding'",
    "ledger": "SELECT rank, name, bytes FROM facts WHERE fact = 'ledger'",
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
        table = _table(one.rows())

        def fill(file: Any, table: Any = table) -> None:
            parquet.write_table(table, file, compression="zstd")

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
            table = parquet.ParquetFile(file).read()
        except (OSError, ValueError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            digests.append(
                Digest(int(found[1]), status="unreadable", file=str(file), problem=f"{file}: {why}")
            )
            continue
        version = (table.schema.metadata or {}).get(_VERSION)
        if version != str(digest.FORMAT).encode() or table.column_names != list(Row._fields):
            raise errors.UnreadableTrace(
                f"{file} is not a digest that this version reads: write the dataset again"
            )
        digests.append(digest.of_rows(int(found[1]), _rows(table)))
    return digests


def query(folder: str | Path, sql: str) -> "pd.DataFrame":
    """Runs a question in DuckDB, in this process. The tables are `facts`, and the views of it.

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
                "CREATE TEMP TABLE facts AS "
                f"SELECT * FROM read_parquet('{files}', hive_partitioning=true)"
            )
            for name, view in _VIEWS.items():
                connection.execute(f"CREATE VIEW {name} AS {view}")
            return connection.execute(sql).df()
    except duckdb.Error as error:
        raise errors.UsageError(f"DuckDB: {error}") from None


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise errors.PytracerError("Parquet needs pyarrow: pip install pyarrow") from None
    return parquet


def _table(rows: Iterable[Row]) -> Any:
    import pyarrow as pa

    kinds = {int | None: pa.int64(), str: pa.string()}
    fields = [(name, kinds[kind]) for name, kind in Row.__annotations__.items()]
    schema = pa.schema(fields, {_VERSION: str(digest.FORMAT)})
    columns: Sequence[Any] = list(zip(*rows, strict=True)) or [()] * len(fields)
    return pa.Table.from_arrays(
        [pa.array(column, kind) for column, (_, kind) in zip(columns, fields, strict=True)],
        schema=schema,
    )


def _rows(table: Any) -> Iterable[Row]:
    columns = [table.column(name).to_pylist() for name in Row._fields]
    return (Row(*row) for row in zip(*columns, strict=True))
