"""The parts of export.py, which turns a trained policy into a directory that other programs can load."""
