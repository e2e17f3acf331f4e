"""`python -m pytracer` is the `pytracer` command."""

import sys

from pytracer.cli import main

sys.exit(main())
