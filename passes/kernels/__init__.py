"""Triton kernels of the passes; imported where a CUDA device runs them."""
