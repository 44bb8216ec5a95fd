"""Images in prompts: model families, the vision tower's outputs, and the image inputs of a step's forward pass."""
