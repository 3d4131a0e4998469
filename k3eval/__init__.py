"""k3eval: call Kimi K3 through any host, with every token metered."""

__version__ = "0.1.0"
