"""Units of networks that train with our own kernels instead of plain modules."""
