"""What all rooms stand on: settings and their checks, the terminal, ranks, files, the hub."""
