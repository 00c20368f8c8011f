"""Models: reading, adapting, checking and saving them, and the room in their context."""
