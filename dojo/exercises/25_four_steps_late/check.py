ANSWER = "c"
CHOICES = {
    "a": "No: the delay costs four steps, but the gradient of an old sample also points somewhere else.",
    "b": "No: one of the three seeds is like this. The other two have given up answers that are still pushed down.",
}
