"""Environments of several turns: those of other packages, through adapters."""
