"""Which matrix products this device likes, and what padding yours would gain, measured."""
