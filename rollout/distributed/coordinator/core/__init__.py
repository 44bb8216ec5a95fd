"""The deterministic part of the coordinator: messages in, messages out. No I/O; the clock is passed in."""
