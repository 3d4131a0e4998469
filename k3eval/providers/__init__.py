"""One module a host: what each provider states about itself."""
