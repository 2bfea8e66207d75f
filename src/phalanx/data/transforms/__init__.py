"""From an image of any size to the pixels a model sees, with all randomness drawn beforehand."""
