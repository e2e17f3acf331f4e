"""docs/gallery.md: its programs run, show the screens that stand there, and their changes help."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pytracer
from tests.tiers import first_of
from tools import gallery_page
from tools.gallery_page import CASES, PAGE, Solved

MIB = 2**20
LEAST_WON = {  # bytes, on any torch
    "out_of_memory": 256 * MIB,
    "leak": 19 * 256 * 1024,
    "optimizer": 7 * MIB,
    "ddp": 6 * MIB,
    "fragmentation": 400 * MIB,
}
pytestmark = pytest.mark.ci


@pytest.fixture(scope="module", params=first_of(CASES, 2, later=pytest.mark.nightly))
def solved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Solved:
    return gallery_page.solve(CASES[request.param], tmp_path_factory.mktemp(request.param))


def without_times(text: str) -> str:
    """Words and bytes: times, and what recording took, are another run's."""
    text = re.sub(r"\d[\d.,]* (?:s|ms|us|ns)\b", "TIME", text)
    text = re.sub(r"^recorded .*(\n {10}.*)*", "recorded", text, flags=re.MULTILINE)
    return " ".join(text.split())


def on_the_page(marker: str) -> str:
    return PAGE.read_text().partition(f"<!-- {marker}:begin -->")[2].partition("<!-- ")[0]


def test_each_change_wins_what_the_case_is_about(solved: Solved) -> None:
    before, after = solved.needed
    assert before - after >= LEAST_WON[solved.case.name], solved.after


def test_the_page_shows_what_the_programs_show(solved: Solved) -> None:
    """Words, bytes, programs and changes; `python tools/gallery_page.py` writes them anew."""
    if gallery_page.stamp() not in PAGE.read_text():
        pytest.skip(f"the page has another torch's screens, not those of {gallery_page.stamp()}")
    for marker, content in solved.parts().items():
        assert without_times(on_the_page(marker)) == without_times(content)


def test_a_screen_of_the_gallery_fits_a_terminal(solved: Solved) -> None:
    """But for what is typed, and the program's own traceback."""
    lines = f"{solved.before}\n{solved.after}".splitlines()
    ours = [line for line in lines if not line.startswith(("$", "RuntimeError"))]
    assert [line for line in ours if len(line) > 80] == []


def test_a_trainer_that_knows_nothing_of_us_is_traced_by_the_command(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    program = gallery_page.PROGRAMS / "trainer.py"
    subprocess.run(
        [sys.executable, "-m", "pytracer", "run", "-o", str(tmp_path / "t.pytrace"), str(program)],
        cwd=gallery_page.ROOT,
        env=gallery_page.machine(),
        check=True,
        capture_output=True,
        timeout=120,
    )
    t = pytracer.load(tmp_path / "t.pytrace")
    assert len(t.steps()) == 5
    assert t.summary().own_peak["optimizer_state"] > 0
