"""Models for scoring only: norms folded into convolutions; on a GPU, CUDA graphs."""
