"""`LLM` and `AsyncLLM`: the engine for callers without a training loop."""
