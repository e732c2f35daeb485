"""Stop signals are announced at once, also during a long call into C."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from fp8_suite.core.signals import announcing_stop_signals, handling_stop_signals

from tests.children import running


def ignore(number, frame):
    pass


def test_a_signal_is_noticed_while_the_main_thread_is_in_c():
    seen, reacted = [], threading.Event()

    def react(number):
        seen.append(number)
        reacted.set()

    with handling_stop_signals(ignore), announcing_stop_signals(react):
        os.kill(os.getpid(), signal.SIGCHLD)  # not a request to stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert reacted.wait(60)
    assert seen == [signal.SIGTERM]
    assert signal.set_wakeup_fd(-1) == -1


def test_a_forked_worker_keeps_its_signals_to_itself():
    seen = []
    with handling_stop_signals(ignore), announcing_stop_signals(seen.append):
        if (child := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert seen == []


def test_a_second_signal_ends_the_process(tmp_path):
    """The main thread sits in one uninterrupted call into C, as in a long GPU step."""
    code = """
import hashlib
from fp8_suite.core.signals import StopFlag
stop = StopFlag()
with stop.listening():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # releases the GIL, as CUDA calls do
"""
    with running([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):  # within a second: the same request
            process.send_signal(signal.SIGINT)
        first = process.stderr.readline()
        time.sleep(1.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "finishing the current step and saving first" in first
    assert "SIGTERM again: ended at once" in errors


@pytest.mark.skipif(sys.platform != "linux", reason="uses prctl")
def test_a_worker_is_told_that_its_parent_is_gone():
    worker = """
import signal, time
from fp8_suite.core.signals import handling_stop_signals, stop_with_parent
seen = []
with handling_stop_signals(lambda number, frame: seen.append(number)):
    stop_with_parent()
    print("ready", flush=True)
    while not seen:
        time.sleep(0.05)
    print(signal.Signals(seen[0]).name, flush=True)
"""
    command = [sys.executable, "-c", worker]
    parent = f"import subprocess; subprocess.run({command!r}, start_new_session=True)"
    with running([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
        assert process.stdout.readline() == "SIGTERM\n"
