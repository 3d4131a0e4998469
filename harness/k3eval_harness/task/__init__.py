"""Tasks in Harbor's format: reader, linter, importers, generators."""
