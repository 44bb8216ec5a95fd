"""The engine's weight sources (shared, gathered, copied), and the detection of unannounced weight changes."""
