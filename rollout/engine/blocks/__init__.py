"""KV blocks of one engine: who holds them, what a prefix lookup finds, and the memory behind them. No tensors."""
