"""The parts of export.py: a trained policy becomes a directory that others can load."""
