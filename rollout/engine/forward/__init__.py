"""The model's forward through paged attention: installation, fused variant, CUDA graphs."""
