"""Each option of a recording is one row, and all that is made of the rows agrees."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pytracer import cli, errors
from pytracer.cli import recording
from pytracer.cli.command import without_program
from pytracer.cli.recording import OPTIONS, Option

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "environment.md"
TEXT = st.text("abcd._", min_size=1, max_size=8)
ONE_OF = {
    "path": TEXT.map(Path),
    "json": TEXT.map(Path),
    "digests": TEXT.map(Path),
    "apply": TEXT.map(Path),
    "steps": st.none() | st.integers(1, 10**6),
    "skip": st.integers(0, 10**6),
    "max_size": st.integers(10**6, 10**12),
    "ranks": st.lists(st.integers(0, 9999), min_size=1, max_size=4).map(tuple),
    "checkpoint": st.lists(TEXT, min_size=1, max_size=3).map(tuple),
    "offload": st.lists(TEXT, min_size=1, max_size=3).map(tuple),
}


def values(option: Option) -> st.SearchStrategy[Any]:
    if option.is_switch:
        return st.just(not option.default)
    return st.sampled_from(option.choices) if option.choices else ONE_OF[option.key]


def settings(options: tuple[Option, ...]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={each.key: values(each) for each in options})


def without_defaults(some: dict[str, Any]) -> dict[str, Any]:
    default = {option.key: option.default for option in OPTIONS}
    return {key: value for key, value in some.items() if value != default[key]}


@given(settings(OPTIONS))
def test_settings_as_words_are_read_back(some: dict[str, Any]) -> None:
    commands = cli._parsers()[1].choices
    own = [*recording.words(some)]
    ours, program = without_program(["run", *own, "train.py", "--steps", "7"], commands)
    assert (ours, program) == (["run", *own], ["train.py", "--steps", "7"])
    read = recording.given(commands["run"].parse_args(own))
    assert read == without_defaults(some)


@given(settings(tuple(option for option in OPTIONS if option.for_environment)))
def test_children_read_the_settings_of_their_parent(some: dict[str, Any]) -> None:
    value = recording.for_children(some)
    assert value is not None
    read = dict(recording.in_environment(value))
    assert read.pop("only") == "children"
    here = {
        key: value.absolute() if isinstance(value, Path) else value
        for key, value in without_defaults(some).items()
        if key != "json"
    }
    assert read == here


@pytest.mark.parametrize("option", [each for each in OPTIONS if not each.for_environment])
def test_children_of_a_changed_program_are_not_recorded(option: Option) -> None:
    value = True if option.is_switch else ("h.0",)
    assert recording.for_children({option.key: value}) is None


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_every_option_reaches_the_plan_or_the_messages(
    option: Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text('checkpoint = ["h.0"]')  # a plan, for --apply
    text = {"N": "7", "SIZE": "2MB", "LIST": "3"}.get(option.value, option.value)
    value = option.read(text)
    plan = recording.plan({option.key: value}, ("train.py",))
    same = recording.plan({}, ("train.py",))
    assert (plan != same) == (option.key not in ("json", "digests", "stop"))


def test_a_schedule_and_steps_to_skip_are_not_both_taken() -> None:
    with pytest.raises(errors.UsageError, match="leave out --skip"):
        recording.given(argparse.Namespace(skip=1, schedule={"skip": 2, "steps": 3}))


def test_the_page_has_the_table_of_the_options() -> None:
    assert recording.table() in PAGE.read_text()
