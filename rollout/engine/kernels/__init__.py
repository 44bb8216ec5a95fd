"""Attention and sampling kernels, one file per task and device; `torch_paged` is the reference for all."""
