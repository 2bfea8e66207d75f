"""Optimizers, weight decay, 16-bit weights and offloaded state."""
