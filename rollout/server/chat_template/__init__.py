"""Chat templates: rendering of conversations, tool-call parsing, reuse of earlier token ids."""
