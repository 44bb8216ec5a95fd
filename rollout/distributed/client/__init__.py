"""Client of a coordinator: submits groups, collects their tokens, sends control calls."""
