"""`python -m pytracer` is the `pytracer` command."""

import os
import sys

if not getattr(sys.flags, "safe_path", False):
    # Not the working directory: the program may have modules there that are called as ours' are.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120

from pytracer.cli import main

sys.exit(main())
