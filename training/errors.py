"""What an exception says, for messages of one line."""


def first_line(error: BaseException) -> str:
    """Its first line, or its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
