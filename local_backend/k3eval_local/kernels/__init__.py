"""Triton kernels, each beside the reference it must match."""
