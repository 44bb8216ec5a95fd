"""The bookkeeping of one engine: admission, ledger, lifecycle, control, steps, and what can be read of it."""
