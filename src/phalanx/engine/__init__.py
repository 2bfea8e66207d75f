"""State, step, loop, scoring and checkpoints: training, independent of model and data."""
