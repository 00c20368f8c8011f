ANSWER = "b"
CHOICES = {
    "a": (
        "No: they would cancel if all rows of a group were divided by the same number. A row is divided by its own "
        "number of tokens, so a part of the prompt's terms is left."
    ),
    "c": (
        "No: the completion's tokens still have the right advantages, and the prompt's terms cancel in part. This is "
        "what a mask that is shifted by one does."
    ),
}
