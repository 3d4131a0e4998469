"""Training and evaluation of small K3 models."""
