"""Everything that knows what a token costs: transport, usage, pricing, ledger, cache."""
