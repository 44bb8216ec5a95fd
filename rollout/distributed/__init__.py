"""Several ranks of one job: messages, connections, client, worker, coordinator, and the parts of one rank."""
