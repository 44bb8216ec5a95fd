"""Logits to tokens and log-probs."""
