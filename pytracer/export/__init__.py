"""Sinks: a trace in, text or bytes out. Nothing here prints, asks torch or changes anything."""
