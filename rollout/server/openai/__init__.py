"""OpenAI-compatible endpoints: request and response schemas, generation, log-prob formats."""
