"""One file per framework; each imports its framework, and nothing else here does."""
