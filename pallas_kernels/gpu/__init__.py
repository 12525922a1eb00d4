"""Pallas kernels for NVIDIA GPUs, one file a backend, so that a backend can go."""
