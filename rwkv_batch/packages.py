"""Packages that only some servers need: what to say where one is missing, or cannot be loaded."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

# What pip is to install.
BASE = "-r requirements.txt"
TRACES = "-r requirements-traces.txt"
CLUSTER = "-r requirements-cluster.txt"
CUDA = "-r requirements-cuda.txt"


class PackageError(Exception):
    """A package cannot be used. The message is a sentence without a full stop, and has the way out.

    `missing`: nothing of it is installed.
    """

    def __init__(self, needs: str, install: str, module: str, error: Exception) -> None:
        """needs: how the sentence begins, before a package. install: what pip is given.

        module, error: see `blamed`.
        """
        package = blamed(error, module)
        self.missing = package is not None
        if package:
            super().__init__(f"{needs} {package}; pip install {install}")
            return
        super().__init__(
            f"{needs} {module.partition('.')[0]}, which is installed but cannot be loaded "
            f"({described(error)}); pip install --force-reinstall {install}"
        )


def load(needs: str, install: str, *modules: str) -> ModuleType:
    """Import modules of one package, and return the last. `needs`, `install`: see PackageError.

    An import runs code of others, which may raise anything. Raises PackageError.
    """
    try:
        return [import_module(module) for module in modules][-1]
    except Exception as error:
        raise PackageError(needs, install, modules[0], error) from error


def blamed(error: Exception, module: str) -> str | None:
    """The package that is not installed, if that is why a module cannot be imported: its own, or another.

    None: what is installed is broken, which a package is too that lacks a module of its own.
    """
    if not isinstance(error, ModuleNotFoundError):
        return None
    parts = (error.name or module).split(".")
    for end in range(1, len(parts) + 1):
        spec = find_spec(name := ".".join(parts[:end]))
        if spec is None:
            return name
        if spec.origin is not None:  # no namespace, whose parts are packages of their own
            return None
    return None


def described(error: Exception) -> str:
    """An error of an import, in a line."""
    text = " ".join(str(error).split()).rstrip(".")[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
