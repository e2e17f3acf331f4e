"""A job of many ranks: one small digest per rank, and what the comparison of digests shows."""
