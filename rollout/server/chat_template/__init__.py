"""Chat messages to prompt text and back: templates, tool calls, the end of a turn."""
