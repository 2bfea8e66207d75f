"""Kernels for EfficientNet's MBConv blocks: depthwise convolutions, squeeze-excite, SiLU."""
