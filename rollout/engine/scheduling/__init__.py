"""Scheduler, block allocator and block tables: which sequences run next and which blocks they hold. No tensors."""
