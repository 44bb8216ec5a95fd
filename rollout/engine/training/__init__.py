"""Changes to the trainer's forward pass: prefix-tree attention, log-probs without stored logits, and exact mode."""
