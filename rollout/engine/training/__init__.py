"""What the trainer's forward uses: prefix trees, replayed routes, exact mode."""
