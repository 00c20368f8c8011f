"""Rows of files and of the hub: reading, checking, ordering, holding out. Nothing here knows a task or a model."""
