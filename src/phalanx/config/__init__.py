"""The options: one schema, read strictly from presets, files and flags."""
