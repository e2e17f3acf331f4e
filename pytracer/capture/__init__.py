"""Recording: hooks, labels, and the sessions that a `trace()` runs."""

# Imported first: it refuses an unsupported torch before anything else imports torch.
from pytracer.data._native import C as C
