"""Messages between client, coordinator and rank, their frames, and the columns that transport tokens."""
