"""Tasks and their rows: reading, checking, holding out, and fitting into the context."""
