"""The formats of datasets, one per file; their common index; recognising a folder's format."""
