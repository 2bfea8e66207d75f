"""What the outside sees of a run: its folder, its records, the console and the report page."""
