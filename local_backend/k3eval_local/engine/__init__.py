"""Caches, scheduler, prefix cache, sampler."""
