"""What exists, as tables: each fact about a model or a dataset stands here once."""
