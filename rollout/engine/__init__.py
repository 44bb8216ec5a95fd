"""Everything that touches the model: one engine per rank, in the training process."""
