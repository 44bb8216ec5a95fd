"""Parts of the trainer's forward: prefix trees, replayed routes, exact mode."""
