"""Puts the real output of `pytracer demo` into README.md, between its markers.

python -m pytracer demo -f > demo.txt          # on the machine of the README
python tools/readme_demo.py demo.txt
"""

import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- demo:begin -->", "<!-- demo:end -->"


def main(output: Path) -> None:
    """Replaces the text between the markers."""
    shown = output.read_text().split("\nWritten to ")[0].rstrip()
    before, _, rest = README.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n```\n{shown}\n```\n{END}{after}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
