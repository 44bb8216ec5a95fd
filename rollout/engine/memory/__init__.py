"""KV cache tensors, their transfer to and from the host, and reusable buffers."""
