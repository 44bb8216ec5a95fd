"""Scheduler, block allocator and block tables: which sequences run next, and their blocks. No tensors."""
