"""Which signals ask a run to save and stop."""

import signal


def stopping() -> list[signal.Signals]:
    """SIGTERM, SIGINT, and SIGHUP unless it is ignored, as nohup has it."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers
