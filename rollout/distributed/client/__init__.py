"""The client of a coordinator, which submits groups, collects their tokens and sends control calls."""
