"""The coordinator's process: socket, launch, schedule file, tokenizer threads. Never imports the engine."""
