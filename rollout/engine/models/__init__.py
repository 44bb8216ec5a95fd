"""What a model's own forward needs: support, masks, attention, recurrent layers, routers, adapters."""
