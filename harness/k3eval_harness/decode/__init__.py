"""Decode cost against context length."""
