"""The model's forward through paged attention: installation, fused CPU variant, CUDA graphs."""
