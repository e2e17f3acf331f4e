"""Screens as people see them, kept as files: `PYTRACER_UPDATE_GOLDEN=1 pytest` writes them anew."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def same_as_golden(name: str, text: str) -> None:
    """Compares with tests/golden/NAME.txt."""
    path = FOLDER / f"{name}.txt"
    text = text.rstrip("\n") + "\n"
    if os.environ.get("PYTRACER_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 80
