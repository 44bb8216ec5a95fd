"""Event loop on a thread, deferred Ctrl-C, fair lock."""
