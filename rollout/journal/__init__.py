"""Finished groups on disk, between two checkpoints of the trainer."""
