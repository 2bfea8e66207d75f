"""What the user asked for: one schema, read strictly from presets, files and flags."""
