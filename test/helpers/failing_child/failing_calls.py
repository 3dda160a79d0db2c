"""In a process of a server: calls that fail once, as the shared page says; see inside_faults.py.

Packages are patched when they have been imported, so that nothing is imported here that the process does not.
"""

import _posixsubprocess
import errno
import fcntl
import importlib.machinery
import inspect
import mmap
import multiprocessing
import os
import struct
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
PRODUCT = tuple(os.path.join(ROOT, name) for name in ("rwkv_batch", "routes", "state_pool.py", "app.py"))
KINDS = ("", "memory", "device memory", "message memory", "send", "receive", "thread", "process")
ROLES = ("", "supervisor", "engine", "frontend", "batches", "database")
# kind, role, which error, calls to let pass (-1: each fails), whether one has failed, calls that were counted
FIELDS = struct.Struct("<6q")
TEXT, MOST_TEXT = 64, 2000  # where it has failed
HOST = "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate memory"
DEVICE = "CUDA out of memory. Tried to allocate 20.00 MiB."


class Page:
    """What fails next, in memory that all processes share."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.memory = mmap.mmap(self._file, mmap.PAGESIZE)
        self._lock = threading.RLock()
        self._busy = threading.local()

    def reach(self, kind: str, error: Callable[[int], BaseException]) -> None:
        """Raises the error if this call is the one that fails."""
        if KINDS.index(kind) != self.memory[0] or getattr(self._busy, "now", False):
            return
        if ROLES[self.memory[8]] != role():
            return
        self._busy.now = True  # the lock below may need what is patched
        try:
            with self._lock:
                fcntl.lockf(self._file, fcntl.LOCK_EX)
                try:
                    armed, whose, which, left, fired, count = FIELDS.unpack_from(self.memory)
                    if not armed:
                        return
                    hit, once = left <= 0, left >= 0
                    armed = 0 if hit and once else armed
                    FIELDS.pack_into(
                        self.memory, 0, armed, whose, which, left - once, fired or hit, count + 1
                    )
                    if not hit:
                        return
                    text = place().encode()[:MOST_TEXT]
                    self.memory[TEXT : TEXT + MOST_TEXT] = text.ljust(MOST_TEXT, b"\0")
                finally:
                    fcntl.lockf(self._file, fcntl.LOCK_UN)
        finally:
            self._busy.now = False
        raise error(which)


def role() -> str:
    name = multiprocessing.current_process().name
    if name == "MainProcess":
        return "supervisor" if sys.argv[0].endswith("app.py") else ""
    return next((each for each in ROLES[1:] if name.startswith(each)), "")


def place(depth: int = 3) -> str:
    """The innermost frames of the product."""
    frame, found = inspect.currentframe(), list[str]()
    while frame is not None and len(found) < depth:
        if frame.f_code.co_filename.startswith(PRODUCT):
            found.append(
                f"{frame.f_code.co_filename[len(ROOT) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
            )
        frame = frame.f_back
    return " < ".join(found)


def install(path: str) -> None:
    page = Page(path)
    _threads(page)
    _processes(page)
    after = {
        "zmq": _zmq,
        "msgspec": _messages,
        "rwkv_batch.engine.serving.process": _torch,
    }
    sys.meta_path.insert(0, AfterImport({name: (patch, page) for name, patch in after.items()}))


class AfterImport:
    """A finder that has packages patched once they are loaded."""

    def __init__(self, patches: dict[str, tuple[Callable[[Page, ModuleType], None], Page]]) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._patches:
            return None
        patch, page = self._patches.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            patch(page, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _counted(page: Page, kind: str, call: Callable[..., Any], error: Callable[[int], BaseException]) -> Any:
    def counted(*arguments: Any, **options: Any) -> Any:
        page.reach(kind, error)
        return call(*arguments, **options)

    return counted


def _threads(page: Page) -> None:
    threading.Thread.start = _counted(  # type: ignore[method-assign]
        page, "thread", threading.Thread.start, lambda which: RuntimeError("can't start new thread")
    )


def _processes(page: Page) -> None:
    def error(which: int) -> OSError:
        return OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    _posixsubprocess.fork_exec = _counted(page, "process", _posixsubprocess.fork_exec, error)  # type: ignore[assignment]


def _zmq(page: Page, zmq: Any) -> None:
    def error(which: int) -> BaseException:
        return (zmq.Again, zmq.ContextTerminated)[which]()

    for name, kind in (("send", "send"), ("recv", "receive")):
        _both(page, zmq.Socket, name, kind, error)


def _both(page: Page, socket: Any, name: str, kind: str, error: Callable[[int], BaseException]) -> None:
    """The method for one frame, and that for a message of several, which fails whole."""
    one, several, inside = getattr(socket, name), getattr(socket, f"{name}_multipart"), threading.local()

    def frame(*arguments: Any, **options: Any) -> Any:
        if not getattr(inside, "now", False):
            page.reach(kind, error)
        return one(*arguments, **options)

    def message(*arguments: Any, **options: Any) -> Any:
        page.reach(kind, error)
        inside.now = True
        try:
            return several(*arguments, **options)
        finally:
            inside.now = False

    setattr(socket, name, frame)
    setattr(socket, f"{name}_multipart", message)


def _messages(page: Page, msgspec: Any) -> None:
    for name, method in (("Encoder", "encode"), ("Decoder", "decode")):
        real = getattr(msgspec.msgpack, name)

        class Counted:
            """In place of the library's class, which cannot be changed."""

            def __init__(self, *arguments: Any, real: Any = real, **options: Any) -> None:
                self._real = real(*arguments, **options)

            def __class_getitem__(cls, item: Any) -> Any:
                return cls

            def __getattr__(self, wanted: str, method: str = method) -> Any:
                found = getattr(self._real, wanted)
                if wanted != method:
                    return found
                return _counted(page, "message memory", found, lambda which: MemoryError())

        setattr(msgspec.msgpack, name, Counted)


def _torch(page: Page, module: ModuleType) -> None:
    """On this thread and on those that it starts from now on."""
    import torch
    from new_tensors import NewTensors, starting_with

    def reach() -> None:
        page.reach("memory", lambda which: RuntimeError(HOST))
        page.reach("device memory", lambda which: torch.cuda.OutOfMemoryError(DEVICE))

    def mode() -> NewTensors:
        return NewTensors(lambda: page.memory[0] in (1, 2), reach)

    threading.Thread.start = starting_with(mode)  # type: ignore[method-assign]
    mode().__enter__()
