"""Paged attention, one file per device. `torch_paged` is the reference that every other must equal."""
