"""Checks every image of a dataset for errors, and finds duplicates."""
