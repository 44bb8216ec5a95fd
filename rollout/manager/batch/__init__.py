"""Samples as tensors: padded, packed, as a tree of their prefixes; their images and scores."""
