"""The deterministic part of the coordinator: messages in, messages out, clock passed in; no I/O."""
