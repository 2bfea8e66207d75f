"""Fused code for GPUs, each with a twin in plain torch that gives the same."""
