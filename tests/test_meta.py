"""The trace's meta document: every field has its type, whatever a file holds."""

import typing
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from pytracer.data import meta
from pytracer.data.meta import (
    DeviceMemory,
    Gpu,
    Meta,
    Options,
    OwnTicks,
    PhaseTimes,
    Process,
    Reading,
)

keys = st.sampled_from(
    [
        *{
            name
            for kind in (Meta, Options, Reading, Gpu, Process, DeviceMemory)
            for name in kind._fields
        },
        *{name for kind in (PhaseTimes, OwnTicks) for name in kind._fields},
        *("devices", "end", "cuda:0", "thread_names", "module_modes"),
    ]
)
plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just("cuda:0")
)
anything = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def assert_is(kind: Any, value: Any) -> None:
    """`value` is of the annotated type, and so is all that is in it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if type(None) in arguments:
        if value is not None:
            assert_is(next(one for one in arguments if one is not type(None)), value)
    elif origin in (tuple, frozenset):
        assert type(value) is origin
        for item in value:
            assert_is(arguments[0], item)
    elif origin is not None:  # a mapping
        assert type(value) is dict
        for key, item in value.items():
            assert_is(arguments[0], key)
            assert_is(arguments[1], item)
    else:
        assert type(value) is kind
        for name, field in typing.get_type_hints(kind).items() if hasattr(kind, "_fields") else ():
            assert_is(field, getattr(value, name))


@given(st.dictionaries(keys, anything, max_size=8))
@example({})
@example({"rank": True, "world_size": "2", "counters": {"end": {"cuda:0": {"a": True, "b": 7}}}})
def test_every_field_has_its_type_whatever_the_document_says(document: dict[str, Any]) -> None:
    assert_is(Meta, meta.read(document))


def test_a_key_of_another_type_counts_as_missing() -> None:
    missing = meta.read({})
    for key in ("options", "counters", "device_memory", "variables", "own_time", "rank", "failed"):
        assert meta.read({key: "a text"}) == missing


@pytest.mark.parametrize(
    ("value", "conf"),
    [
        ("expandable_segments:True", "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "max_split_size": 5}, "a:1"),
        ("", ""),
        (7, ""),
    ],
)
def test_the_allocators_settings_are_a_text_or_torchs_table(value: Any, conf: str) -> None:
    assert meta.read({"allocator_settings": value}).alloc_conf == conf
