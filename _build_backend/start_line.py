"""The package as setuptools builds it, and the line beside it by which PYTRACER=1 is heard."""

from pathlib import Path

from setuptools.command.build_py import build_py

START = "pytracer.pth"  # Python's site runs it where packages are installed, and nowhere else


class BuildPython(build_py):
    def run(self) -> None:
        super().run()
        root = Path(__file__).resolve().parents[1]
        self.copy_file(str(root / START), str(Path(self.build_lib, START)))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib, START))]
