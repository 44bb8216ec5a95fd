"""Captured decode steps on CUDA."""
