"""The server: one model over HTTP, in three dialects, with requests put together into batches."""
