"""Reports over finished jobs."""
