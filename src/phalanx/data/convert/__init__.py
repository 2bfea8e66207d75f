"""Data from one format into another."""
