"""State, step, loop, scores and checkpoints: what training is, without saying of what."""
