"""The KV blocks of one engine: who holds them, prefix lookups, and which memory they use. No tensors."""
