"""One inference engine per rank, in the training process: scheduling, KV memory, weights, forward and sampling."""
