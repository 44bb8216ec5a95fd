"""The fused CPU forward: families, binding, checks."""
