"""A recorded trace: its columns, its words, and the door to the binaries that read it."""
