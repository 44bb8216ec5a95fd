"""An OpenAI-compatible HTTP server in front of one `LLM`."""
