"""Lock-step forwards of ranks that exchange tokens with each other's experts."""
