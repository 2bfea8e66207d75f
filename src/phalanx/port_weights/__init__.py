"""Old weights to weights.safetensors: files of older programs under the names of our models."""
