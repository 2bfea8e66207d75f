"""Command lines of older programs, and what they are here."""
