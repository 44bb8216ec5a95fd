"""What a training loop holds: `RolloutManager`, its batch, suspension, checkpoint, telemetry."""
