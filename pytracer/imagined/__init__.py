"""Runs a program on an imagined card: real classes, a real step, no memory. See `pytracer.imagine`."""
