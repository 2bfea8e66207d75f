"""Operations that have a fused Triton kernel for GPUs beside a reference in plain torch."""
