"""Engines that run trials."""
