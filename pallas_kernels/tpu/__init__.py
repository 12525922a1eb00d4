"""Mosaic kernels: one module a job, each with one function named after it."""
