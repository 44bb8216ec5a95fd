"""The messages between clients, coordinator and ranks, their frames, and the columns that carry tokens."""
