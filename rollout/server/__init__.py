"""OpenAI-compatible HTTP server over one `LLM`."""
