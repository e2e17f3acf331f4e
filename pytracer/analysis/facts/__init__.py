"""What happened: scopes, lives of blocks, phases, categories and owners."""
