"""Searches over training options: every trial is a separate run."""
