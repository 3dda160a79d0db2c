"""What Python keeps of threads that it has not started, as Robyn's are."""

import ctypes
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from routes.guard.threads import keep_state

c = ctypes.CDLL(None)
Call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
ROOT = Path(__file__).resolve().parents[2]


class Kept:
    """Something that a thread has."""


def in_a_foreign_thread(*steps: Callable[[], object]) -> None:
    """Two calls into Python or more by a thread that Python has not started, which then ends."""
    failed = []

    def called(step: Callable[[], object]) -> Callable[[object], None]:
        def call(_: object) -> None:
            try:
                step()
            except Exception as error:
                failed.append(error)

        return call

    later = [Call(called(step)) for step in steps[1:]]

    def begin() -> None:
        steps[0]()
        for call in reversed(later):  # the last is called first, when the thread has left `begin`
            c.__cxa_thread_atexit_impl(call, None, c.pthread_create)

    first, thread = Call(called(begin)), ctypes.c_ulong()
    assert c.pthread_create(ctypes.byref(thread), None, first, None) == 0
    assert c.pthread_join(thread, None) == 0
    assert not failed, failed


def test_what_a_thread_has_stays_between_its_calls_and_goes_when_it_ends():
    local = threading.local()
    seen: list[weakref.ref[Kept]] = []

    def first() -> None:
        keep_state()
        local.kept = Kept()
        seen.append(weakref.ref(local.kept))

    def second() -> None:
        keep_state()
        seen.append(weakref.ref(local.kept))

    in_a_foreign_thread(first, second, second)
    assert len(seen) == 3 and seen[0] is seen[1] is seen[2], "the state was another one in a later call"
    assert seen[0]() is None, "the state was kept when its thread had ended"


def test_a_thread_with_the_number_of_one_that_has_ended_is_kept_too():
    """Python lists a thread that has asked for its own name, also when it has ended."""
    local = threading.local()
    seen: list[int] = []

    def first() -> None:
        keep_state()
        local.number = threading.current_thread().native_id

    for _ in range(3):
        in_a_foreign_thread(first, lambda: seen.append(local.number))
    assert len(seen) == 3


def test_many_threads_at_once():
    """Each has its own, and none keeps another's."""
    local = threading.local()
    seen: list[tuple[int, int]] = []

    def one(number: int) -> None:
        def first() -> None:
            keep_state()
            local.number = number

        in_a_foreign_thread(first, lambda: seen.append((number, local.number)))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [(number, number) for number in range(20)]


def test_threads_of_pythons_own_end_as_ever():
    """Their state is theirs, and the main thread's is gone when it ends."""
    program = """
import threading
from routes.guard.threads import keep_state
ends = []
threads = [threading.Thread(target=keep_state) for _ in range(5)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
keep_state()
print("whole")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
