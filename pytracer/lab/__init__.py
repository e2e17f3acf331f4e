"""Experiments that no tracer needs: matrix shapes, and documents' claims measured again."""
