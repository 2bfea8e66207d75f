"""Older programs: tables of their options, and what becomes of each."""
