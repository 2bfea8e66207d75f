"""Models for scoring only: norms folded into convolutions, one CUDA graph per batch size."""
