"""The version, also in pyproject.toml; a test keeps them equal. And the releases of torch."""

__version__ = "0.2.0"

# The oldest that compiles, and those that the matrix was run with (docs/support.md).
OLDEST_TORCH = "2.11"
TESTED_TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")
