"""What an exception says, for messages of one line, what it came of, and how a command ends."""

from collections.abc import Iterator

EXIT_BAD_SETTING = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: the same command again goes on


def first_line(error: BaseException) -> str:
    """Its first line, or its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def origins(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it was raised from or while handling, and so on."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop(0)
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        waiting += [found.__cause__, found.__context__]


def raise_interrupt(error: BaseException) -> None:
    """KeyboardInterrupt if the error came of one: libraries clean up and raise errors of their own."""
    if any(isinstance(origin, KeyboardInterrupt) for origin in origins(error)):
        raise KeyboardInterrupt from error
