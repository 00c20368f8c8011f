ANSWER = "b"
CHOICES = {
    "a": (
        "No: so it begins in one of the seeds. But what does a policy earn that steps back and forward until the turns "
        "are used up?"
    ),
    "c": (
        "No: this is true of a difference of potentials, which makes a step back cost what a step forward pays. Here a "
        "step back costs nothing."
    ),
}
