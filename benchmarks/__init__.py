"""Measurements. Each writes its result below results/."""

import re


def slug(device: str) -> str:
    """Returns a device's name for use in a file name: nvidia-h200 for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
