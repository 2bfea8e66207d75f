"""Dialects: the options of older programs as tables, and what becomes of each."""
