"""1x1 convolutions as GEMMs with norms, residuals and activations fused into them."""
