"""Parts of a model's own forward: support, masks, attention, recurrent layers, routers, adapters."""
