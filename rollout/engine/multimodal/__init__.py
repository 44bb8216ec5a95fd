"""Images in a prompt: families of models, the vision tower's outputs, and the image inputs of a step's forward."""
