"""Multi-turn episodes: sampling one completion at a time, environments, and the batch of finished episodes."""
