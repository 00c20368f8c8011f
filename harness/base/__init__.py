"""The foundation of all other packages: settings and their checks, the terminal, ranks, files, the hub."""
