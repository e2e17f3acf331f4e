"""The door for another accelerator: one row in each table, and a folder of its own in csrc."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pytracer.data import _native, schema
from pytracer.data._native import C

ROOT = Path(__file__).parents[1]

MADE_UP_TRACKER = r"""
#include "../core/tracker.h"

#include <cstdlib>

namespace pytracer {

namespace {

class MadeUpTracker final : public DeviceTracker {
 public:
  explicit MadeUpTracker(const RecorderCalls& calls) : calls_(calls) {}

  bool ready() const override { return std::getenv("MADEUP_IS_UP") != nullptr; }

  std::string attach() override { return {}; }

  void seed() override {
    uint16_t place = calls_.place({0, 0, 0, DeviceType::kCuda, 3});
    calls_.record(Action::kSnapshot, place, 0, 0);
    calls_.record(Action::kSeed, place, 0x1000, 4096);
  }

 private:
  const RecorderCalls& calls_;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) DeviceTracker* pytracer_open_tracker(
    const RecorderCalls& calls) {
  return new MadeUpTracker(calls);
}

}  // namespace pytracer
"""

# Only the row is added; of all steps those of its tracker run.
BUILD = r"""
import json, shutil, sys
from pathlib import Path

sys.path.insert(0, "_build_backend")
import native

native.ACCELERATORS += (
    native.Accelerator(
        name="madeup",
        title="MADEUP",
        library="c10",  # which is loaded beside any torch
        version_in=lambda torch: "1.0",
        version_beside_others="1.0",
        find_headers=lambda version: ["/usr/include"],
        wheels=lambda version: [],
        flags=lambda torch: ["-DIS_MADE_UP"],
    ),
)
run_all = native.run_all

def run_some(steps, tell):
    wanted = ("madeup", "libc10.so")
    some = [step for step in steps if any(each in step.output.name for each in wanted)]
    run_all(some, tell)

native.run_all = run_some

def install(binaries, into, facts):
    for binary in binaries:
        if binary.exists():
            shutil.copy2(binary, into)
    print(json.dumps(facts["torches"]))

native.install = install
native.build([native.torch_in(Path("torch"))], Path("."))
"""

RECORD = r"""
import json, os, sys
import torch
from pytracer.data._native import C

assert C.open_device_tracker("cuda", os.fsencode(sys.argv[1])) == ""
assert C.has_device_tracker("cuda") and not C.has_device_tracker("cpu")

def recorded(come_up):
    session = C.Held().session()
    phases = C.PhaseTimes(None, pending=1, calls=1, others=1, kept=1)
    begun = session.begin(100, False, False, True, False, False, phases)
    assert begun == "", begun
    come_up()
    found = session.end_and_read()
    return {name: found[name].tolist() for name in ("events.action", "events.bytes")}

queued = torch.cuda._queued_calls
before = len(queued)

def torch_brings_it_up():
    assert len(queued) == before + 1
    queued[-1][0]()

later = recorded(torch_brings_it_up)
assert len(queued) == before, "a call of ours is left"
os.environ["MADEUP_IS_UP"] = "1"
at_once = recorded(C.seed_device)
assert len(queued) == before
print(json.dumps([later, at_once]))
"""


def run(script: str, *arguments: str, cwd: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what builds, with a folder for an accelerator that does not exist."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("_build_backend", "csrc", "pytracer/basics/version.py"):
        source, into = ROOT / name, copy / name
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, into) if source.is_dir() else shutil.copy(source, into)
    (copy / "csrc" / "madeup").mkdir()
    (copy / "csrc" / "madeup" / "madeup_tracker.cpp").write_text(MADE_UP_TRACKER)
    (copy / "torch").mkdir()
    shutil.copy(Path(torch.__file__).with_name("version.py"), copy / "torch")
    return copy


def test_a_row_and_a_folder_make_a_tracker_that_records(made_up: Path) -> None:
    """The build compiles the folder, and what the library reports becomes events."""
    release = _native.release_of(str(torch.__version__))
    torches = run(BUILD, cwd=made_up)
    assert torches[release]["madeup"] == "1.0"
    library = made_up / f"_madeup-torch{release}.so"
    seeded = {
        "events.action": [schema.ACTION["snapshot"], schema.ACTION["seed"]],
        "events.bytes": [0, 4096],
    }
    assert run(RECORD, str(library), cwd=ROOT) == [seeded, seeded]


def test_the_tracker_of_each_accelerator_that_torch_has_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device has a tracker if one of its libraries opens; else the reasons are given."""
    opened: list[tuple[str, bytes]] = []

    def open_device_tracker(device: str, path: bytes) -> str:
        opened.append((device, path))
        return ""

    rows = (
        *_native._ACCELERATORS,
        _native._Accelerator("rocm", "ROCm", "cuda", lambda torch: True),
        _native._Accelerator("xpu", "XPU", "xpu", lambda torch: True),
    )
    monkeypatch.setattr(_native, "_ACCELERATORS", rows)
    monkeypatch.setattr(_native, "HERE", tmp_path)
    (tmp_path / "_rocm-torch2.13.so").touch()
    beside = ModuleType("torch")
    beside.__dict__.update(__version__="2.13.1", version=SimpleNamespace(cuda=None))
    extension = ModuleType("_C")
    extension.__dict__.update(open_device_tracker=open_device_tracker)
    problems = _native._open_trackers(beside, extension)
    assert opened == [("cuda", bytes(tmp_path / "_rocm-torch2.13.so"))]
    assert problems["cuda"] == ""
    assert "this build of pytracer has no XPU tracker" in problems["xpu"]


def test_all_tables_have_the_same_devices() -> None:
    """The words of Python, of C++ and of the opener, and a folder for each row of the build."""
    sys.path.insert(0, str(ROOT / "_build_backend"))
    try:
        import native
    finally:
        sys.path.remove(str(ROOT / "_build_backend"))
    assert C.device_types == schema.DEVICE_TYPES
    assert {row.device for row in _native._ACCELERATORS} == {*schema.DEVICE_TYPES} - {"cpu"}
    built = {row.name for row in native.ACCELERATORS}
    assert built == {row.name for row in _native._ACCELERATORS}
    folders = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    assert folders == {"core", "driver", "torch", "view", *built}


def test_a_device_that_nobody_knows_is_refused_by_name() -> None:
    for name in ("cpu", "xpu", ""):
        assert (
            C.open_device_tracker(name, b"/nowhere.so") == f"no accelerator has the name '{name}'"
        )
        assert not C.has_device_tracker(name)


def test_the_map_names_the_files_of_an_accelerator() -> None:
    """docs/architecture.md says what another accelerator takes, and these files exist."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## Another accelerator")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `([\w/.]+\.(?:h|py))", section, re.MULTILINE))
    assert named == {
        "csrc/core/event.h",
        "csrc/torch/devices.h",
        "_build_backend/native.py",
        "pytracer/data/_native.py",
        "pytracer/data/schema.py",
    }
    assert all((ROOT / name).is_file() for name in named)
