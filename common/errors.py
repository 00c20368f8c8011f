"""The errors that are meant for the user."""


class UserError(Exception):
    """A problem that the user can correct. The user sees a single sentence, without a traceback."""


class EngineError(UserError):
    """A problem with an inference engine, in one sentence. The run ends, and can be resumed with another engine."""
