"""The bookkeeping of one engine: intake of requests, ledger, lifecycle, control, steps and inspection."""
