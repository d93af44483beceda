"""Fused Triton kernels."""

AVAILABLE = False
