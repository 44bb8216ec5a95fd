"""The messages between clients, coordinator and ranks, their encoding as frames, and the columns that contain tokens."""
