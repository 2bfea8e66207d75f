"""Ranks: starting and connecting them, common decisions, and the exchange of tensors."""
