"""Conversion of datasets from one format to another."""
