"""From an image of any size to the model's input, with all randomness drawn beforehand."""
