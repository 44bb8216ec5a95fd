"""Sampler: logits and sampling parameters to tokens and log-probs."""
