"""Objects of a training loop: `RolloutManager`, its rounds, groups, checkpoint and telemetry."""
