"""The bookkeeping of one engine: admission, ledger, lifecycle, control, steps, inspection."""
