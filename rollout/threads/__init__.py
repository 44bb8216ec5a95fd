"""Thread utilities: an event loop on a thread, deferred Ctrl-C, a fair lock, and a fair queue for an engine."""
