"""The HTTP server of the local backend: ``python -m k3eval_local.server --model a``."""
