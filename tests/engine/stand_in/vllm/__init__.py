"""Not vLLM: a package of its name, for the command that starts its server. Tests import it under another name."""
