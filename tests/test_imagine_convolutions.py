"""What imagined convolutions take: cuDNN's answers without a card, held against passes measured on one."""

import importlib.util
import json
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pytracer
from benchmarks import kept
from benchmarks.cudnn_claims import (
    ANSWERED,
    ASKED,
    FILES,
    RESULTS,
    WRONG_ONCE,
    Claim,
    claims,
    counted,
)
from pytracer.imagined import convolutions, cudnn, persistent
from pytracer.imagined.cards import find
from pytracer.imagined.convolutions import Convolutions, Problem

HERE = Path(__file__).parent
STORED = kept.read(HERE / "data" / "cudnn_answers.json")


class Answers:
    """A cuDNN whose answers were stored."""

    def __init__(self, version: int = STORED["cudnn"]) -> None:
        self.version = version
        self.stored = {_key(row): row["answer"] for row in STORED["answers"]}
        self.questions: Counter[str] = Counter()

    def start(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self.questions[_key(question)] += 1
        answer = self.stored.get(_key(question))
        return dict(zip(ANSWERED, answer, strict=True)) if answer else {}


def _key(row: dict[str, Any]) -> str:
    return json.dumps([row[name] for name in ASKED])


@pytest.fixture(scope="module")
def found() -> list[Claim]:
    """What is said of every ninth measured row, with the stored answers."""
    rows = [
        row
        for file in FILES
        for row in kept.read(RESULTS / file)["convolutions"][:: STORED["every"]]
    ]
    return list(claims(rows, Convolutions(find("H100"), Answers())))


def test_what_is_said_to_be_exact_was_measured_so(found: list[Claim]) -> None:
    assert [one for one in found if one.is_exact and not one.is_right] == []
    assert sum(one.is_exact for one in found) >= 0.95 * len(found) >= 0.95 * 490


def test_no_measured_pass_is_outside_of_its_interval(found: list[Claim]) -> None:
    assert [one for one in found if not one.is_right] == []


@pytest.mark.parametrize("operation", ["forward", "input", "weight"])
def test_scratch_of_each_pass_is_exact_for_most_shapes(found: list[Claim], operation: str) -> None:
    these = [one for one in found if one.operation == operation]
    assert sum(one.is_exact for one in these) >= 0.9 * len(these)


@pytest.mark.parametrize(("input", "weight"), WRONG_ONCE)
def test_what_was_once_said_wrong_is_right(
    input: list[int],  # noqa: A002 - as in the results
    weight: list[int],
) -> None:
    these = [
        row
        for file in FILES
        for row in kept.read(RESULTS / file)["convolutions"]
        if (row["input"], row["weight"]) == (input, weight)
    ]
    answers = Answers()
    found = list(claims(these, Convolutions(find("H100"), answers)))
    assert len(found) == 3
    assert all(one.is_right for one in found)
    assert all(question in answers.stored for question in answers.questions)


@pytest.mark.skipif(cudnn.installed() is None, reason="cuDNN is not installed")
@pytest.mark.parametrize(("file", "wrong"), [*zip(FILES, (0, 0, 0, 1, 1), strict=True)])
@pytest.mark.nightly
def test_every_measured_pass_is_as_cudnn_says_here(file: str, wrong: int) -> None:
    """Also, the results' page has the same counts, and tells of the two that were never explained."""
    known = Convolutions(find("H100"), cudnn.installed())
    counts = counted(claims(kept.read(RESULTS / file)["convolutions"], known))
    known.close()
    stored = kept.read(RESULTS / "cudnn-claims-cpu.json")["files"][file]
    assert counts == {name: stored[name] for name in counts}
    assert counts["exact"] - counts["exact_and_right"] == wrong
    assert counts["passes"] - counts["within"] == wrong


# ---------------------------------------------------------------- what torch asks


@pytest.fixture
def asked() -> tuple[Convolutions, Answers]:
    answers = Answers()
    return Convolutions(find("H100"), answers), answers


def _convolve(known: Convolutions, x: Any, w: Any, **how: Any) -> Any:
    ways = x.dim() - 2
    moves = [
        [how.get(name, default)] * ways
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    ]
    rest = (how.get("transposed", False), [0] * ways, how.get("groups", 1))
    y = torch.ops.aten.convolution.default(x, w, None, *moves, *rest)
    return known.taken(torch.ops.aten.convolution.default, (x, w, None, *moves, *rest), y)[0][1]


def _tensors(*shapes: tuple[int, ...], dtype: Any = torch.float16) -> list[Any]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


def test_a_kernel_of_one_pixel_counts_as_channels_first(asked: Any) -> None:
    """In both orders its numbers lie the same; torch takes the order of the input."""
    x, w = _tensors((2, 64, 8, 8), (32, 64, 1, 1))
    assert not convolutions._has_channels_last([32, 64, 1, 1], w.stride())
    assert convolutions._has_channels_last(
        x.shape, x.to(memory_format=torch.channels_last).stride()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_does_each_channel_by_itself(asked: Any, dtype: Any) -> None:
    """And takes nothing for it."""
    known, answers = asked
    taken = _convolve(
        known, *_tensors((2, 64, 28, 28), (64, 1, 3, 3), dtype=dtype), padding=1, groups=64
    )
    assert (taken.least, taken.most, answers.questions) == (0, 0, Counter())


@pytest.mark.parametrize(
    ("image", "channels", "side", "stride", "is_asked"),
    [
        ((2, 64, 28, 28), 64, 3, 1, True),
        ((2, 24, 28, 28), 24, 3, 1, False),  # few channels
        ((2, 64, 5, 5), 64, 3, 1, False),  # a small image
        ((2, 64, 28, 28), 64, 7, 1, False),  # a wide kernel
        ((2, 64, 28, 28), 64, 3, 2, False),  # few channels that move by two
        ((1, 64, 28, 28), 64, 3, 2, True),  # one image
        ((2, 512, 28, 28), 512, 3, 2, True),
        ((2, 64, 28), 64, 7, 1, True),  # a row
    ],
)
def test_torch_gives_some_channels_in_float16_to_cudnn(
    asked: Any, image: tuple[int, ...], channels: int, side: int, stride: int, is_asked: bool
) -> None:
    """By its own rule of `use_cudnn_depthwise`."""
    known, answers = asked
    weight = (channels, 1, *[side] * (len(image) - 2))
    _convolve(known, *_tensors(image, weight), stride=stride, padding=side // 2, groups=channels)
    assert bool(answers.questions) == is_asked


@pytest.mark.parametrize(("name", "value"), [("benchmark", True), ("enabled", False)])
def test_where_torch_asks_otherwise_the_interval_stays(
    asked: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: bool
) -> None:
    known, answers = asked
    monkeypatch.setattr(torch.backends.cudnn, name, value)
    taken = _convolve(known, *_tensors((2, 64, 28, 28), (64, 64, 3, 3)), padding=1)
    assert taken.least == 0 < taken.most
    assert not answers.questions


@pytest.mark.parametrize("card", ["A100-80GB", "RTX4090"])
def test_a_card_that_nobody_measured_is_not_asked_about(card: str) -> None:
    answers = Answers()
    known = Convolutions(find(card), answers)
    assert _convolve(known, *_tensors((2, 64, 28, 28), (64, 64, 3, 3)), padding=1).least == 0
    assert not answers.questions
    assert known.document()["advice"] == ""


def test_another_cudnn_than_the_measured_is_not_believed() -> None:
    answers = Answers(version=90800)
    known = Convolutions(find("H100"), answers)
    _convolve(known, *_tensors((2, 64, 28, 28), (64, 64, 3, 3)), padding=1)
    assert not answers.questions
    assert known.document()["advice"].startswith("The installed cuDNN 90800 was never")


def test_a_tensor_in_the_wrong_order_is_copied_first(asked: Any) -> None:
    """torch brings the input into the order of the weight, and keeps the copy until the call ends."""
    known, answers = asked
    answers.ask = lambda _: {"bytes": 0, "allowed": 0, "unsplit": 0, "knobs": {}}
    x, w = _tensors((2, 64, 28, 28), (64, 1, 3, 3))
    taken = _convolve(known, x, w.to(memory_format=torch.channels_last), padding=1, groups=64)
    assert taken.beside == (2 * 64 * 28 * 28 * 2,)
    x, w = _tensors((2, 64, 28, 28), (64, 64, 1, 1))
    taken = _convolve(known, x.to(memory_format=torch.channels_last)[:, :, ::2], w)
    assert taken.beside == (2 * 64 * 14 * 28 * 2,)


# ---------------------------------------------------------------- kernels that share tiles

KNOBS = {
    persistent.TILE: 0,
    persistent.LENGTH: 0,
    persistent.SHARES: 0,
    persistent.DOWN: 1,
    persistent.ACROSS: 1,
}


def test_whole_rounds_of_tiles_take_no_scratch() -> None:
    kernel = persistent.Kernel("forward", "float32", KNOBS)
    for rounds in (1, 2):
        assert kernel.scratch(132 * rounds, 100, 132) == (0, 0)


def test_a_gradient_of_nine_tiles_is_shared_by_fourteen_blocks_each() -> None:
    """Measured: 32 images of 28 by 28 with 128 channels took 8,258,199 bytes."""
    kernel = persistent.Kernel("weight", "float32", KNOBS)
    image, weight = (32, 128, 28, 28), (128, 128, 3, 3)
    assert kernel.tiles(image, weight, image) == (9, 784)
    assert kernel.scratch(9, 784, 132) == (8_258_199, 8_258_199)


def test_tiles_of_groups_are_believed_if_smaller_cards_have_them() -> None:
    """Eight tiles of 64 by 64 took 1,442,335 bytes beside copies of 12,748,816 on an H100."""
    problem = replace(
        PROBLEM,
        operation="weight",
        x=((4, 96, 56, 56), (301056, 3136, 56, 1)),
        w=((48, 48, 2, 2), (192, 4, 2, 1)),
        y=((4, 48, 55, 55), (145200, 3025, 55, 1)),
        groups=2,
    )
    knobs = [*{**KNOBS, persistent.TILE: 5}.items()]
    kernel = persistent.Kernel("weight", "float32", dict(knobs))
    tiles, steps = kernel.tiles(problem.x[0], problem.w[0], problem.y[0], problem.groups)
    assert (tiles, steps) == (8, 379)
    copies = 12_748_816
    fewer = [[count, copies + kernel.scratch(tiles, steps, count)[0]] for count in range(1, 18)]
    answers = Answers()
    answer = {
        "allowed": 0,
        "bytes": copies + kernel.scratch(tiles, steps, 18)[0],
        "unsplit": copies,
    }
    answers.ask = lambda _: {"knobs": knobs, "fewer": fewer, **answer}  # type: ignore[method-assign]
    known = Convolutions(find("H100"), answers)
    said = known.of_problem(problem, 0)
    assert said is not None
    assert (said.least, said.most) == (14_191_151, 14_191_151)
    fewer[3][1] += 1 << 20
    said = known.of_problem(problem, 0)
    assert said is not None
    assert said.least < said.most


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("operation", ["forward", "input", "weight"])
def test_scratch_is_never_more_than_a_tile_for_each_block(operation: str, dtype: str) -> None:
    for tile in persistent.TILES:
        kernel = persistent.Kernel(operation, dtype, {**KNOBS, persistent.TILE: tile})
        for tiles in range(1, 500, 7):
            for steps in (1, 8, 40, 1000):
                least, most = kernel.scratch(tiles, steps, 132)
                assert 0 <= least <= most <= kernel.at_most(132)


# ---------------------------------------------------------------- the process


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that answers as cuDNN does."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    made = tmp_path_factory.mktemp("cudnn") / "libcudnn.so.9"
    source = HERE / "fake_cudnn.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return made


PROBLEM = Problem(
    operation="forward",
    dtype="float32",
    x=((1, 8, 4, 4), (128, 16, 4, 1)),
    w=((8, 8, 3, 3), (72, 9, 3, 1)),
    y=((1, 8, 2, 2), (32, 4, 2, 1)),
    padding=(0, 0),
    stride=(1, 1),
    dilation=(1, 1),
    groups=1,
    transposed=False,
    last=False,
    tf32=True,
    deterministic=False,
)


def test_the_first_plan_that_is_allowed_and_can_be_made_answers(fake: Path) -> None:
    """Engine 1 rounds its inputs, engine 2 has no plan. Tensors are aligned to 32 bytes."""
    asker = cudnn.Cudnn(fake)
    assert asker.start()
    assert asker.version == 91900
    assert asker.ask(PROBLEM.question()) == {
        "engine": 3,
        "knobs": [[25, 0], [28, 1]],
        "bytes": 3032,
        "allowed": 0,
        "unsplit": 3031,
        "fewer": [[count, 3032] for count in range(1, 18)],
    }
    asker.close()
    assert asker.ask(replace(PROBLEM, dtype="bfloat16").question()) == {}


def test_a_kernel_compiled_at_run_time_needs_no_plan(fake: Path) -> None:
    """cuDNN offers it where it finds a library with the name of CUDA's driver, even without a card."""
    asker = cudnn.Cudnn(fake)
    asker.start()
    answer = asker.ask(replace(PROBLEM, dtype="float16").question())
    asker.close()
    assert (answer["engine"], answer["bytes"], answer["unsplit"]) == (2, 2032, 2031)


def test_cudnn_finds_a_cublaslt_and_may_give_it_memory(fake: Path) -> None:
    """It tells how much, since only a card knows what of it is taken."""
    asker = cudnn.Cudnn(fake)
    asker.start()
    answer = asker.ask(replace(PROBLEM, dtype="bfloat16").question())
    asker.close()
    assert (answer["engine"], answer["bytes"], answer["allowed"]) == (3, 3032, 4 << 20)


@pytest.mark.parametrize("has_compiler", [True, False])
def test_cudnn_counts_with_the_compiler_of_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_compiler: bool
) -> None:
    """Without it cuDNN offers other kernels than on a card."""
    names = ["cudnn/lib/libcudnn.so.9", *["cu13/lib/libnvrtc.so.13"] * has_compiler]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    found = ModuleSpec("nvidia.cudnn", None, is_package=True)
    found.submodule_search_locations = [str(tmp_path / "cudnn")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    assert (cudnn.installed() is not None) == has_compiler


def test_without_tensorfloat_no_plan_of_tensor_cores_answers(fake: Path) -> None:
    asker = cudnn.Cudnn(fake)
    asker.start()
    assert asker.ask(replace(PROBLEM, tf32=False).question()) == {"engine": None}
    asker.close()


@pytest.mark.parametrize("text", ["no library", ""])
def test_a_library_that_does_not_load_leaves_the_interval(tmp_path: Path, text: str) -> None:
    file = tmp_path / "libcudnn.so.9"
    file.write_text(text)
    known = Convolutions(find("H100"), cudnn.Cudnn(file))
    taken = _convolve(known, *_tensors((2, 64, 28, 28), (64, 64, 3, 3)), padding=1)
    assert taken.least == 0 < taken.most
    assert known.document()["advice"].startswith("A cuDNN is installed that does not load")


@pytest.mark.parametrize("said", ["", "nonsense", "[1]", "{}"])
def test_a_process_that_says_something_else_has_no_answer(tmp_path: Path, said: str) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        f"print('{{\"version\": 91900}}', flush=True)\ninput()\nprint({said!r}, flush=True)\n"
    )
    asker = cudnn.Cudnn(tmp_path / "libcudnn.so.9", child)
    assert asker.start()
    assert asker.ask(PROBLEM.question()) == {}
    asker.close()


@pytest.mark.parametrize("cards", ["0", "0,1", None])
def test_the_process_sees_no_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cards: str | None
) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        "import os; print('{\"version\": %d}' % (os.environ.get('CUDA_VISIBLE_DEVICES') == ''))\n"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if cards is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cards)
    asked = cudnn.Cudnn(tmp_path / "library", child)
    assert asked.start()
    asked.close()


def test_a_process_that_says_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "_SECONDS", 0.5)
    child = tmp_path / "child.py"
    child.write_text("import time\ntime.sleep(60)\n")
    assert not cudnn.Cudnn(tmp_path / "libcudnn.so.9", child).start()


def test_a_product_is_an_interval_without_a_measured_cudnn() -> None:
    """What cuBLASLt takes was measured with one version of cuDNN."""
    taken = []
    for version in (STORED["cudnn"], 90800):
        answers = Answers(version)
        answers.ask = lambda _: {"bytes": 0, "allowed": 0, "unsplit": 0, "knobs": {}}  # type: ignore[method-assign]
        known = Convolutions(find("H100"), answers)
        taken.append(_convolve(known, *_tensors((2, 64, 28, 28), (64, 64, 1, 1))))
    assert taken[0].most == 0 == taken[1].least < taken[1].most


def test_the_same_question_is_asked_once(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asker = cudnn.Cudnn(fake)
    asker.start()
    first = asker.ask(PROBLEM.question())
    asker.close()
    assert asker.ask(PROBLEM.question()) == first


def test_the_table_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "installed", lambda: None)
    with pytracer.imagine("H100") as t:
        layer = nn.Conv2d(8, 8, 3).to("cuda")
        layer(torch.randn(2, 8, 16, 16, device="cuda")).sum().backward()
    assert cudnn.ADVICE in " ".join(str(t).split())
    assert t.data.meta["imagined"]["convolutions"]["passes"] == 2


def test_an_imagined_run_asks_and_takes_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers()
    size = 50 << 20
    monkeypatch.setattr(
        answers,
        "ask",
        lambda _: {"engine": 1, "knobs": [], "bytes": size, "allowed": 0, "unsplit": size},
    )
    monkeypatch.setattr(cudnn, "installed", lambda: answers)
    with pytracer.imagine("H100") as t, torch.no_grad():
        layer = nn.Conv2d(8, 8, 3).to("cuda", torch.float16)
        layer(torch.randn(2, 8, 16, 16, device="cuda", dtype=torch.float16))
    assert t.data.meta["imagined"]["convolutions"] == {
        "passes": 1,
        "exact": 1,
        "cudnn": 91900,
        "advice": "",
    }
    assert size in set(t.allocations().requested_bytes)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_channels_of_a_result_lie_where_cudnn_puts_them(dims: int, dtype: torch.dtype) -> None:
    """Last, if those of input or weight do, so that rows are copied before a linear layer."""
    kind = nn.Conv2d if dims == 2 else nn.Conv3d
    order = torch.channels_last if dims == 2 else torch.channels_last_3d
    size = (2, 8, *[8] * dims)
    whole = torch.Size(size).numel() * dtype.itemsize
    with pytracer.imagine("H100") as t:
        layer = kind(8, 8, 3, padding=1).to("cuda", dtype, memory_format=order)
        made = layer(torch.ones(size, device="cuda", dtype=dtype))
        assert made.is_contiguous(memory_format=order)
        double = kind(8, 8, 3, padding=1).to("cuda", torch.double, memory_format=order)
        assert double(torch.ones(size, device="cuda", dtype=torch.double)).is_contiguous()
        nn.Flatten()(made)
    rows = t.allocations()
    assert rows[rows.op == "aten::clone"].requested_bytes.tolist() == [whole]
