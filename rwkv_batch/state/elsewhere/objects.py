"""A store of objects in which servers share images: S3, or any other that fsspec knows by its URL.

Images there are a cache as those on a disk are. So nothing waits for a store that is slow or away: a call has
a limit of time, and one that does not return makes those after it fail at once.
"""

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from rwkv_batch import packages
from rwkv_batch.packages import PackageError
from rwkv_batch.state.entries import StoreError

T = TypeVar("T")

NEEDS = "--image-store with a URL needs"

USER = re.compile(r"://([^/@]*@)")  # in a URL
NAME = re.compile(r"([1-9][0-9]{0,18})\.state", re.ASCII)  # of an object


class Objects:
    """The images of one database at a URL. `identity`: of that database. Raises StoreError.

    `url`: without a user's name and password, as messages and the database have it.
    It is not asked for anything before the first call.
    """

    def __init__(self, url: str, identity: str) -> None:
        options = {"auto_mkdir": True} if url.startswith(("file:", "local:")) else {}
        user = USER.search(url)
        self._secret = user[1] if user else ""
        try:
            self._files, root = _loaded(url, self._shown(url)).url_to_fs(url, **options)
        except PackageError as error:
            raise StoreError(f"{error}.") from None
        except Exception as error:  # of each kind of store another one
            sentence = f"--image-store {url} is not understood ({one_line(error)})."
            raise StoreError(self._shown(sentence)) from None
        self.url = self._shown(url)
        self._folder = f"{root.rstrip('/')}/rwkv_states-{identity}"
        self._reads, self._writes = Bounded("state objects read"), Bounded("state objects written")
        self._lists = Bounded("state objects listed")

    def write(self, turn: int, image: bytes, seconds: float) -> None:
        """Store an image, in place of any other one of that turn."""
        self._run(self._writes, lambda: self._files.pipe_file(self._path(turn), image), seconds)

    def read(self, turn: int, most: int, seconds: float) -> bytes | None:
        """An image of at most so many bytes; None if there is none, or a longer one."""
        try:
            data = self._run(
                self._reads, lambda: self._files.cat_file(self._path(turn), start=0, end=most + 1), seconds
            )
        except FileNotFoundError:
            return None
        return bytes(data) if len(data) <= most else None

    def remove(self, turn: int, seconds: float) -> None:
        """A missing one is ignored."""
        with suppress(FileNotFoundError):
            self._run(self._writes, lambda: self._files.rm_file(self._path(turn)), seconds)

    def turns(self, digits: str, seconds: float) -> list[int]:
        """Turns that have images, of those whose numbers begin with these digits."""

        def find() -> list[str]:
            try:
                return [str(path) for path in self._files.find(self._folder, prefix=digits)]
            finally:
                self._files.invalidate_cache()  # which would keep the names

        try:
            paths = self._run(self._lists, find, seconds)
        except FileNotFoundError:
            return []
        names = (NAME.fullmatch(path.rpartition("/")[2]) for path in paths)
        return sorted(int(name[1]) for name in names if name and name[1].startswith(digits))

    def _path(self, turn: int) -> str:
        return f"{self._folder}/{turn}.state"

    def _run(self, thread: "Bounded", work: Callable[[], Any], seconds: float) -> Any:
        """Raises FileNotFoundError, StoreError."""
        try:
            return thread.run(work, seconds)
        except FileNotFoundError:
            raise
        except Exception as error:  # of each kind of store another one
            sentence = f"The image store {self.url} cannot be used ({one_line(error)})."
            raise StoreError(self._shown(sentence)) from None

    def _shown(self, text: str) -> str:
        """Without the name and the password that the URL may have."""
        return text.replace(self._secret, "") if self._secret else text


def _loaded(url: str, shown: str) -> Any:
    """fsspec's core, once what it needs for such a URL is loaded. Raises PackageError, StoreError.

    shown: the URL for messages. It may have several stores, as simplecache::s3://bucket.
    """
    registry = packages.load(NEEDS, packages.CLUSTER, "fsspec", "fsspec.registry")
    for link in url.split("::"):
        name = link.partition(":")[0]
        if name not in registry.known_implementations:  # of which it says so itself
            continue
        module = registry.known_implementations[name]["class"].rpartition(".")[0]
        try:
            registry.get_filesystem_class(name)
        except Exception as error:
            why = error.__cause__ if isinstance(error.__cause__, ImportError) else error
            if packages.blamed(why, module):
                sentence = f"--image-store {shown} needs a package that is not installed ({one_line(error)})."
                raise StoreError(sentence) from None
            package = module.partition(".")[0]
            raise PackageError(f"--image-store {shown} needs", package, module, why) from None
    return packages.load(NEEDS, packages.CLUSTER, "fsspec.core")


class Bounded:
    """A thread for calls that may never return. For one caller; started when it is first used."""

    def __init__(self, name: str) -> None:
        self._name, self._busy = name, False
        self._jobs: SimpleQueue[Callable[[], None]] | None = None

    def run(self, work: Callable[[], T], seconds: float) -> T:
        """Its result, or its error. Raises TimeoutError after so long, or if an earlier call still runs."""
        if self._busy:
            raise TimeoutError("it has not answered an earlier call")
        if self._jobs is None:
            jobs = SimpleQueue[Callable[[], None]]()
            threading.Thread(target=self._serve, args=(jobs,), name=self._name, daemon=True).start()
            self._jobs = jobs  # a thread that could not start is tried again at the next call
        outcome, done = list[tuple[T | None, Exception | None]](), threading.Event()

        def job() -> None:
            try:
                outcome.append((work(), None))
            except Exception as error:
                outcome.append((None, error))
            except BaseException as error:  # such as asyncio's cancellation: the thread goes on
                outcome.append((None, OSError(type(error).__name__)))
            self._busy = False
            done.set()

        self._busy = True
        self._jobs.put(job)
        if not done.wait(seconds):
            raise TimeoutError("it does not answer in time")
        value, error = outcome[0]
        if error:
            raise error
        return value  # type: ignore[return-value]

    @staticmethod
    def _serve(jobs: "SimpleQueue[Callable[[], None]]") -> None:
        while True:
            jobs.get()()


def one_line(error: Exception) -> str:
    """What an error says, in a line."""
    text = " ".join(str(error).split())
    return text.rstrip(".")[:200] or type(error).__name__
