"""One inference engine per rank, in the training process: scheduling, KV memory, weights, forward pass and sampling."""
