"""The parts of a model's own forward pass: support checks, masks, attention, recurrent layers, routers, adapters."""
