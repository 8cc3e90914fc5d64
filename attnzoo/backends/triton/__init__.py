"""The portable Triton kernels of `flash`: helpers in `tiles`, one file a kernel, tile sizes in `table`."""
