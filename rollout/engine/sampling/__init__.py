"""The sampler, which turns logits and sampling parameters into tokens and log-probs."""
