"""Portable Triton kernels over a block layout."""
