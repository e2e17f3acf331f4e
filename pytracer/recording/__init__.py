"""Recording: `trace()`, and programs that are recorded without a change."""
