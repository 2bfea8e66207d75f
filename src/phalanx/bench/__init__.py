"""Measurements: ratios taken in one run on one machine, with their spread."""
