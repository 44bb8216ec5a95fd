"""Which sequences run next and which blocks they hold; no tensors."""
