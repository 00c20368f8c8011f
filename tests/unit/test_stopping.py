"""What a process can say when its main thread cannot."""

import signal
import threading

from common.plumbing.signals import call_after_signal


def test_a_signal_is_noticed_by_another_thread():
    """Also before Python can call its handler; and nothing is called without a signal, or if the block ends in time."""
    called = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with call_after_signal(0.0, called.set):
            pass
        with call_after_signal(600.0, called.set):
            signal.raise_signal(signal.SIGTERM)
        assert not called.is_set()
        with call_after_signal(0.01, called.set):
            signal.raise_signal(signal.SIGTERM)
            assert called.wait(60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.set_wakeup_fd(-1) == -1
