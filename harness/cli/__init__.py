"""The command line: flags become the settings of a program.

parse.py resolves the defaults that depend on the model.
"""
