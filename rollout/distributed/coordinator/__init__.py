"""The coordinator's process: socket, launch, schedule file and tokenizer threads. It never imports the engine."""
