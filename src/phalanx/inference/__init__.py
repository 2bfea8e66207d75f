"""Models that only score: norms folded into convolutions, and a CUDA graph for each batch size."""
