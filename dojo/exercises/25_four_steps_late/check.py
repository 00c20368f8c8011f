ANSWER = "c"
CHOICES = {
    "a": "No: the delay costs four steps, but the gradient of an old sample also points somewhere else.",
    "b": "No: at a small learning rate it would be so, and one of the three seeds is so. At 2e-4 four steps are far.",
}
