"""Answers to the questions that people ask of a trace."""
