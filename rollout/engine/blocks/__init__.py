"""KV blocks of one engine: their holders, prefix lookups, and the memory behind them. No tensors."""
