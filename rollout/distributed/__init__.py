"""The parts of a job on several ranks: messages, connections, client, worker, coordinator, and one rank's membership."""
