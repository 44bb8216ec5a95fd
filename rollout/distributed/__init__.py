"""The parts of a job on several ranks: messages, connections, client, worker, coordinator, and each rank's membership."""
