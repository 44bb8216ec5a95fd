"""Samples as tensors (padded, packed, or as a tree of their prefixes), with their images and scores."""
