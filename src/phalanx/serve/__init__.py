"""The server: one model over HTTP, in three protocols; requests are combined into batches."""
