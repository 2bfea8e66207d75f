"""Kernels of the blocks of EfficientNet: depthwise convolutions, squeeze-excite, SiLU."""
