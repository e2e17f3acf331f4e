"""Where memory lay: segments and blocks, the gaps between them, and the device's ledger."""
