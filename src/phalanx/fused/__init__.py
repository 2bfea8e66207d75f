"""Blocks of networks that train by kernels of our own, in the place of plain modules."""
