"""The command line: flags become the settings of a program."""
