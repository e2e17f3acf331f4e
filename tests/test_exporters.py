"""The table of exporters: the command line and the docs read it."""

from pathlib import Path

import pytest

from pytracer.cli import main
from pytracer.data.recorded import Trace
from pytracer.export.exporters import EXPORTERS, Exporter

ROOT = Path(__file__).parents[1]
RUN = ROOT / "tests" / "data" / "streamed-1.1.pytrace"


def write_count(trace: Trace, path: str | Path, *, overwrite: bool = False) -> Path:
    Path(path).write_text(f"{len(trace.events.ticks)}")
    return Path(path)


@pytest.fixture
def with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    count = Exporter("count", (".count",), write_count, "Read {} with cat.")
    monkeypatch.setitem(EXPORTERS, "count", count)


@pytest.mark.usefixtures("with_another")
@pytest.mark.parametrize("by", [["-o", "run.count"], ["--format", "count"]])
def test_a_line_in_the_table_is_a_format_of_the_command(
    by: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run.pytrace"
    run.write_bytes(RUN.read_bytes())
    assert main(["export", str(run), *by]) == 0
    assert int((tmp_path / "run.count").read_text()) > 0
    assert "run.count with cat." in capsys.readouterr().out


@pytest.mark.usefixtures("with_another")
def test_a_limit_that_a_format_does_not_take_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(RUN), "-o", str(tmp_path / "run.count"), "--full"]) == 2
    assert "--full is for --format chrome and perfetto" in capsys.readouterr().err
    assert not (tmp_path / "run.count").exists()


def test_no_two_formats_have_the_same_suffix() -> None:
    suffixes = [suffix for exporter in EXPORTERS.values() for suffix in exporter.suffixes]
    assert len(suffixes) == len(set(suffixes))


@pytest.mark.parametrize("name", EXPORTERS)
def test_the_help_names_each_format(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    assert name in capsys.readouterr().out


def test_the_docs_have_a_row_for_each_format() -> None:
    page = (ROOT / "docs" / "chrome-trace.md").read_text()
    table = page.partition("## All formats")[2].splitlines()
    rows = [line for line in table if line.startswith("| `") and "--format" not in line]
    listed = [row[: row.rindex("|", 0, row.rindex("|"))] for row in rows]
    expected = [
        f"| `{each.name}` | {', '.join(f'`{suffix}`' for suffix in each.suffixes)} "
        for each in EXPORTERS.values()
    ]
    assert listed == expected
