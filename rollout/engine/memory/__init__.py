"""KV cache tensors, their transfer to the host, and reusable buffers."""
