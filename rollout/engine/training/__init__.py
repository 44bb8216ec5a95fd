"""Parts of the trainer's forward pass: prefix trees, log-probs read tile by tile, exact mode."""
