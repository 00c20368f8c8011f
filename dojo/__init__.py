"""Exercises that check themselves: python -m dojo."""
