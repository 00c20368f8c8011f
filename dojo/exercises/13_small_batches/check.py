ANSWER = "a"
CHOICES = {
    "b": (
        "No: the number of completions is the same, but the number of updates is not. At one learning rate, 8 steps of "
        "AdamW are a much shorter way than 128."
    ),
    "c": (
        "No: they have the least noise, but the gradients of small batches are good enough here, and 8 steps of AdamW "
        "at this learning rate do not lead far."
    ),
}
