"""What docs/stability.md promises: names that stay, and files that stay readable."""

import re
from pathlib import Path

import pytest

import pytracer
from pytracer import errors
from pytracer.recording.api import Views

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
PAGE = (ROOT / "docs" / "stability.md").read_text()

# One file of every format that was released, kept forever: its peak, and each step's growth.
FORMATS = {
    "1.0": (13_312, [1696] + [400 + 4 * step for step in range(23)]),
    "1.1": (78_524, [31_600] + [4000] * 5),
}


@pytest.mark.parametrize("version", FORMATS)
def test_a_file_of_each_released_format_is_read_whole(version: str) -> None:
    peak, growth = FORMATS[version]
    loaded = pytracer.load(DATA / f"streamed-{version}.pytrace")
    assert loaded.file_report["version"] == version
    assert loaded.file_report["status"] == "complete"
    assert len(loaded.health()) == 0
    assert loaded.peak.bytes == peak
    assert loaded.steps().growth_bytes.tolist() == growth
    assert loaded.summary().own_peak["weights"] > 0


@pytest.mark.parametrize("version", FORMATS)
def test_what_was_read_of_an_old_file_can_be_saved_in_todays(version: str, tmp_path: Path) -> None:
    old = pytracer.load(DATA / f"streamed-{version}.pytrace")
    new = pytracer.load(old.save(tmp_path / "new.pytrace"))
    assert new.file_report["version"] == list(FORMATS)[-1], "a new format needs its file here"
    assert new.summary().equals(old.summary())
    assert new.steps().equals(old.steps())


def test_files_of_each_format_are_among_the_projects_own() -> None:
    """None is made anew by a test: then it would not be old."""
    assert {path.name for path in DATA.glob("streamed-*")} == {
        f"streamed-{version}.pytrace" for version in FORMATS
    }


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_page_names_every_public_name_and_no_other() -> None:
    section = PAGE.partition("## Public names")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([A-Za-z_][\w.]*)`", section))
    views = {f"t.{name}" for name in public(Views) | public(pytracer.trace)}
    views |= {f"t.{name}" for name in public(pytracer.LoadedTrace)} - {"t.is_read"}
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and kind.__module__ == errors.__name__
    }
    expected = views | set(pytracer.__all__) | {f"errors.{name}" for name in kinds}
    assert named - expected == set(), "these are promised and not there"
    assert expected - named == set(), "these are there and not promised"
