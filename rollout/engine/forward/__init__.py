"""The model's forward passes over the KV cache: inputs, runner, detection of changes, and trials that verify the model."""
