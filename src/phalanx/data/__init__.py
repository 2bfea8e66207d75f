"""Images from files to batches of bytes; nothing in this room imports torch."""
