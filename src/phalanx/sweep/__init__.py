"""Searches over training options: every trial is a run of its own."""
