"""A run without a device: real classes, a real step, made-up memory. `pytracer.imagine` is its door."""
