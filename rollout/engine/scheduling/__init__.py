"""Scheduler, queues and block tables: which sequences run next, and in which KV blocks. No tensors."""
