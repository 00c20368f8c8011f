"""Whether an answer is right: as text, as exact numbers, or as the library math-verify says in processes of its own."""
