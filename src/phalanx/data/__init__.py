"""Images from files to batches of bytes; only device.py imports torch, which workers never do."""
