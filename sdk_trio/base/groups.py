"""The one exception that a group of exceptions is reported as. Pure."""


def only_member(error: BaseException) -> BaseException:
    """Return the only exception of nested groups of one; any other exception as it is."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
