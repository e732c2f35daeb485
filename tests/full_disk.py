"""A disk that is full."""

import resource
from contextlib import contextmanager


@contextmanager
def disk_that_takes(num_bytes: int):
    """Let no file of this process grow beyond `num_bytes`: a real write error, EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
