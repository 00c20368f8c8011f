ANSWER = "a"
CHOICES = {
    "b": (
        "No: it moves by 0.07. Training has changed more than the chance of one attempt: it has also made the attempts "
        "more alike."
    ),
    "c": (
        "No: this would be so if the attempts were as different as before. RL has aimed them better and made them more "
        "alike."
    ),
}
