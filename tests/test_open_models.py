"""Named open models as published: what an imagined rank holds is what its parameters' shapes say."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import open_models, open_models_by_hand as by_hand

pytest.importorskip("transformers", minversion="5")
MODELS = open_models.models()
QUICK = [
    ("meta-llama/Llama-3.2-1B", "FSDP2"),
    ("google-bert/bert-base-uncased", "one card"),
    ("openai-community/gpt2", "DDP"),
]


def pairs() -> list[Any]:
    """Each model in each way: a handful in the quick tier, two of three models once in the next."""
    found: list[Any] = []
    for number, (name, entry) in enumerate(MODELS.items()):
        for turn, way in enumerate(open_models.WAYS):
            if open_models.refusal(entry, way) is not None:
                continue
            rotated = number % 3 > 0 and turn == number % len(open_models.WAYS)
            tier = (
                [] if (name, way) in QUICK else [pytest.mark.ci if rotated else pytest.mark.nightly]
            )
            found.append(pytest.param(name, way, marks=tier, id=f"{name}, {way}"))
    return found


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a model that returns a view
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "way"), pairs())
def test_a_rank_holds_what_the_shapes_of_its_parameters_say(
    name: str, way: str, tmp_path: Path
) -> None:
    """Weights, gradients and AdamW's state, to the byte, as the optimizer steps."""
    entry = MODELS[name]
    config = open_models.config_of(entry)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = by_hand.on_meta(config)
    order, ranks = open_models.WAYS[way], open_models.ranks(entry, way)
    for rank in open_models.ranks_of(entry, way):
        held = open_models.held(open_models.imagined(entry, tmp_path, way, rank))
        assert held == by_hand.held(model, order, ranks, rank, entry.get("idle", "")), rank


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_has_the_number_of_parameters_in_the_file(name: str) -> None:
    """The number is the published one for most models; else a new transformers builds the same."""
    whole = by_hand.on_meta(open_models.config_of(MODELS[name], whole=True))
    assert by_hand.parameters(whole) == MODELS[name]["parameters"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_an_exception_is_transformers_own(name: str) -> None:
    """A model without a plan or checkpoints here has none in transformers; a scalar is one."""
    model = by_hand.on_meta(open_models.config_of(MODELS[name]))
    reasons = MODELS[name].get("cannot", {})
    assert ("no plan" in reasons.get("tensor parallel", "")) is not bool(model.tp_plan)
    checkpoints = bool(model.supports_gradient_checkpointing)
    assert ("checkpointed" in reasons) is not checkpoints
    assert ("FSDP2" in reasons) is any(one.dim() == 0 for one in model.parameters())


def test_there_are_fifty_models_and_each_is_trained_in_some_way() -> None:
    """An exception names its reason, and a layer is cut to what the file says."""
    assert len(MODELS) >= 50
    for entry in MODELS.values():
        assert set(entry.get("cannot", {})) < set(open_models.WAYS)
        assert all(len(reason) > 20 for reason in entry.get("cannot", {}).values())
