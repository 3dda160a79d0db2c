"""What Python keeps of the threads of Robyn's, which it has not started itself.

For each call from such a thread Python would make a state, and map and unmap a stack: of that all cores take
note that run threads of this process. A stream is pulled for each of its events.
"""

import ctypes
import threading

LOCKED = 0  # of PyGILState_STATE: the thread goes on with Python's lock
AtEnd = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# Of glibc and for C++: what is called when a thread ends, before Python's state of it is out of reach, as it
# is for the destructors of POSIX.
_at_end = getattr(ctypes.CDLL(None), "__cxa_thread_atexit_impl", None)
_release = ctypes.pythonapi.PyGILState_Release  # also as an address in a library that stays loaded


def _let_go(_: int | None) -> None:
    """Undo the call of `keep_state` as its thread ends: with the one for this call the state goes."""
    _release(LOCKED)


_end = AtEnd(_let_go)  # which must live as long as any thread


class Looked(threading.local):
    """Whether `keep_state` has seen this thread."""

    at = False


_looked = Looked()


def keep_state() -> None:
    """Have Python keep its state of this thread until the thread ends, unless Python has started it.

    What the thread has in a `threading.local` stays too. Without glibc nothing is kept.
    """
    if not _looked.at:
        _looked.at = True
        # By the system's number: Python's is soon that of another thread, and it lists some that have ended.
        number = threading.get_native_id()
        if _at_end is not None and all(number != each.native_id for each in threading.enumerate()):
            ctypes.pythonapi.PyGILState_Ensure()
            _at_end(_end, None, _release)
