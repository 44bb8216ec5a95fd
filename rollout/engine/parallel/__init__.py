"""Ranks that compute forward passes together: tensor-parallel groups, and rounds of ranks that exchange tokens."""
