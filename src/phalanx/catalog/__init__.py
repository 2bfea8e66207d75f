"""Tables of what exists: each fact about a model or a dataset is here, once."""
