"""Shell completion and the man page: made from the options of all commands."""

import shutil
import subprocess

import pytest

from pytracer import cli
from pytracer.cli import completion


def completed(line: str) -> list[str]:
    """What bash offers after this line."""
    words = line.split(" ")
    typed = " ".join(f"'{word}'" for word in words)
    script = completion._bash(cli._parsers()[0]) + (
        f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _pytracer; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return subprocess.check_output(["bash", "-c", script], text=True).split()


def test_bash_completes_commands_options_and_values() -> None:
    """What no option fits is left to bash, which offers files."""
    assert completed("pytracer su") == ["summary"]
    assert completed("pytracer summary --ad") == ["--advice"]
    assert completed("pytracer summary a.pytrace --at ") == ["peak", "end"]
    assert completed("pytracer summary --at ") == ["peak", "end"]
    assert completed("pytracer cost --by ") == ["class", "module", "op"]
    assert "class" not in completed("pytracer summary --by ")
    assert completed("pytracer gemm sweep --lib") == ["--library"]
    assert completed("pytracer run train") == []


def test_the_man_page_has_every_option_and_is_right() -> None:
    """groff finds nothing to warn of."""
    page = completion._man(cli._parsers()[0])
    for words, parser in completion._all(cli._parsers()[0]):
        assert not words or f".SS pytracer {words.replace('-', chr(92) + '-')}\n" in page
        for action in completion._options(parser):
            assert all(flag.replace("-", "\\-") in page for flag in action.option_strings)
    if not shutil.which("groff"):
        pytest.skip("needs groff")
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww"], input=page, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
