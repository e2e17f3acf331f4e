"""The claims themselves, a file for each subject. `pytracer.claims.catalog` has their order."""
