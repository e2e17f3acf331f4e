"""What is said about training memory, measured again on this machine: `pytracer confirm`."""
