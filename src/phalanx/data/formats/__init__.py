"""Where images lie: one file a format, the index they share, and how a folder's format is told."""
