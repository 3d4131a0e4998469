"""The local backend: a scaled Kimi K3 reference model behind an OpenAI-compatible server."""
