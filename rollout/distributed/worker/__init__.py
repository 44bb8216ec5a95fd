"""The worker of one rank, which connects the rank's engine to a coordinator."""
