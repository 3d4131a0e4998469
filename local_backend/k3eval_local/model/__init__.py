"""The reference model in plain torch: the specification for every faster path."""
