"""What a training loop holds: `RolloutManager`, its rounds, groups, checkpoint and telemetry."""
