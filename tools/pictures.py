"""Makes the pictures of the report and of a notebook again, in a headless Chromium.

    python tools/pictures.py [FOLDER]

Without a folder it replaces those in docs/images. Both show tests/data/h200.pytrace. The notebook is
a dark page with the content policy of VS Code's notebooks (programs/notebook_hosts.py).
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from programs.notebook_hosts import VS_CODE, put_in_by_a_script  # noqa: E402
from pytracer import load  # noqa: E402

TRACE = ROOT / "tests" / "data" / "h200.pytrace"
_READY = "html[data-ready]"
_LOAD_MS = 120_000
_REST_MS = 8_000  # what rests is drawn bar by bar


def main(folder: Path) -> None:
    """Writes report.png and notebook.png."""
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as place:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        report(browser, Path(place), folder / "report.png")
        notebook(browser, Path(place), folder / "notebook.png")
        browser.close()


def report(browser: Browser, place: Path, target: Path) -> None:
    """All steps, by events: by time, the first step would take most of the width."""
    page = place / "run.html"
    load(TRACE).report(page)
    tab = browser.new_page(viewport={"width": 1440, "height": 900})
    tab.goto(page.as_uri())
    tab.wait_for_selector(_READY, state="attached", timeout=_LOAD_MS)
    tab.get_by_label("go by").select_option("events")
    tab.get_by_role("button", name="Whole trace").click()
    tab.wait_for_timeout(_REST_MS)
    tab.evaluate("scrollTo(0, 0)")
    tab.screenshot(path=target)


def notebook(browser: Browser, place: Path, target: Path) -> None:
    """The last value of a cell."""
    page = place / "notebook.html"
    output = load(TRACE)._repr_html_()  # type: ignore[operator]
    page.write_text(put_in_by_a_script(output, VS_CODE))
    tab = browser.new_page(viewport={"width": 1280, "height": 1460}, color_scheme="dark")
    tab.goto(page.as_uri())
    tab.frame_locator("iframe").locator(_READY).wait_for(state="attached", timeout=_LOAD_MS)
    tab.wait_for_timeout(_REST_MS)
    tab.screenshot(path=target)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
