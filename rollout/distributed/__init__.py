"""Several ranks of one job: messages, connections, client, worker, coordinator, and what one rank assembles of them."""
