"""Tasks and their rows: read, checked, held out, and fitted into the context."""
