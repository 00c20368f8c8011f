"""Models: read, adapted, refused where they cannot be trained, and saved; and how much memory a run needs."""
