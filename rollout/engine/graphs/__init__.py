"""Decode steps captured as CUDA graphs."""
