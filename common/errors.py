"""The errors that are meant for the user."""


class UserError(Exception):
    """Something that the user can correct; shown as one sentence, without a traceback."""


class EngineError(UserError):
    """What is wrong with an inference engine, in a sentence. The run ends, and can be resumed with another engine."""
