"""Thread utilities: event loop on a thread, deferred Ctrl-C, fair lock, FIFO turns."""
