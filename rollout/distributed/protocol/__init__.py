"""Messages between client, coordinator and rank, their frames, and the columns in which tokens travel."""
