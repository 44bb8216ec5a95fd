"""Everything that decides about ranks, and the process around it. Never imports the engine."""
