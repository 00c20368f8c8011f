"""Whether an answer is right: as text, as an exact number, or by math-verify in separate processes."""
