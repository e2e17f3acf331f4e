"""Where it lay: segments and blocks, what is lost between them, and the device's books."""
