"""What would happen with other settings, sizes, cards and checkpoints."""
