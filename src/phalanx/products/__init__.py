"""1x1 convolutions as products that take norms, residuals and activations along."""
