"""The model's forward passes over the KV cache, the detection of changes to the model, and trial passes that verify it."""
