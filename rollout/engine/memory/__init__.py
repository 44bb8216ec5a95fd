"""KV tensors, their transfer to the host, reusable buffers."""
