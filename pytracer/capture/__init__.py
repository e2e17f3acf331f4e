"""Recording: what is hooked, what is labelled, and the sessions that a `trace()` runs in."""

# First, since it refuses a torch that is not supported before that is imported.
from pytracer._native import C as C
