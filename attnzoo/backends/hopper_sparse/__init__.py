"""Gluon kernels over a block layout, for Hopper (sm_90)."""
