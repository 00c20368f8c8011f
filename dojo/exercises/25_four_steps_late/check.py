ANSWER = "c"
CHOICES = {
    "a": "No: the delay itself would cost four steps, but the gradient of an old sample points somewhere else. Four steps at 2e-4 are far.",
    "b": "No: at a small learning rate it would be so, and one of the three seeds is like this. At 2e-4 four steps are far.",
}
