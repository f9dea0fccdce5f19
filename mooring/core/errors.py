"""Errors that a person can act on."""


class RequestError(ValueError):
    """The request or its input is wrong: one sentence that says where, what was found and what would be right."""


class WorkError(RuntimeError):
    """The request was right but the work failed: one sentence that says what happened and what to try."""
