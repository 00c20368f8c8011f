"""The one error that is meant for the user."""


class UserError(Exception):
    """Something that the user can correct; shown as one sentence, without a traceback."""
