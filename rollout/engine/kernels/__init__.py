"""Attention and sampling kernels, one file per job and device; `torch_paged` is the reference for all."""
