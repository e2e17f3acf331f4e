"""The claims themselves, a file for each subject. `pytracer.lab.claims.catalog` has their order."""
