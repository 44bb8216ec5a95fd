"""The fused CPU forward pass, with its model families, parameter addresses and checks."""
