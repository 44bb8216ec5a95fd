"""Weight sources of the engine (shared, gathered, copied) and detection of unannounced changes."""
