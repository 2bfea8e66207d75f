"""The output of a run: its folder, its records, the console and the report page."""
