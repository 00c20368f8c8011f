"""Whether an answer is right: as text, as an exact number, or as math-verify says in processes of its own."""
