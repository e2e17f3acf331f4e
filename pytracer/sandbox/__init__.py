"""Runs a program so that it changes no file of the user's and sends nothing."""
