"""Thread utilities: an event loop on a thread, deferred Ctrl-C, a fair lock, and turns in order of arrival."""
