"""The fused CPU forward pass: model families, parameter addresses, checks."""
