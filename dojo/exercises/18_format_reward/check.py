ANSWER = "c"
CHOICES = {
    "a": (
        "No: there is a signal in these groups, but what does it teach? A completion that reasons breaks the format "
        "more often than one that answers at once."
    ),
    "b": (
        "No: only 2 % break the format, but where no answer is right, these few alone decide about the "
        "advantages. The division by the standard deviation makes them large."
    ),
}
