"""Ranks that compute forwards together: a tensor-parallel group, and rounds of ranks that exchange tokens."""
