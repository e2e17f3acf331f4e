"""Recording: what is hooked, what is labelled, and the sessions that a `trace()` runs in."""
