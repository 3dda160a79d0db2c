"""Servers that several test files share; each starts when the first test asks for it."""

import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from itertools import product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import certifi
import cuda_gpu
import fewer_cases
import postgres_server
import pytest
import serving
import torch
from ahead import LateRunner
from hypothesis import HealthCheck, settings
from own_memory import OwnMemory
from postgres_server import PostgresServer
from serving import Server
from tools import absent

from rwkv_batch.bundled import unpack
from rwkv_batch.model.cuda.gemms import autotune
from rwkv_batch.model.cuda.gemms.gemms import Gemms
from rwkv_batch.model.cuda.gemms.kinds import KINDS
from rwkv_batch.ops import device
from rwkv_batch.ops.cuda import build
from rwkv_batch.runner import backends, groups
from rwkv_batch.text import tokenizer

if TYPE_CHECKING:
    from reference import Reference


# Folders and marked files that `make test` leaves out and `make check` has (CONTRIBUTING.md).
THOROUGH = ("kernels", "page", "deploy")
ENGINE_GIB = 4  # of a GPU, for each engine of servers on it
LOG_SHOWN = 8000  # characters of a server's log
NEEDS_GPU = re.compile(r"^pytestmark = (?:\[\*)?needs_gpu\b", re.MULTILINE)  # files without another test
MARKED = re.compile(r"^pytestmark = pytest\.mark\.thorough$", re.MULTILINE)
MEMORY = OwnMemory()

# Hypothesis tries the same cases each time, also on a slow machine. --hypothesis-profile default: others.
settings.register_profile(
    "fixed",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out what is thorough")
    parser.addoption(
        "--ahead",
        action="store_true",
        help="engines in the tests' own process queue steps ahead, as on a GPU",
    )
    parser.addoption(
        "--portable",
        choices=sorted(build.TILES),
        help="tests of an NVIDIA GPU run the kernels for this AMD one, as --backend portable does",
    )
    parser.addoption(
        "--emulated",
        choices=sorted(build.TILES),
        help="tests of kernels in test/kernels run those for this AMD GPU on a CPU: slow, so name some",
    )
    parser.addoption("--most-cases", type=int, help="of every test that needs a GPU, at most so many cases")
    parser.addoption("--engines", type=int, help="servers on the CPU have so many engines")
    parser.addoption("--pictures", action="store_true", help="tests of the page keep its pictures in docs/")
    parser.addoption("--schemas", type=int, default=60, help="random JSON schemas that a model writes to")
    parser.addoption("--stages", type=int, help="models on the CPU run in so many stages")
    parser.addoption(
        "--servers-on", help="servers run there, with such flags: 'cuda:0,cuda:0 --batch-invariant', or [0,0]"
    )
    parser.addoption(
        "--gpu-stages", type=int, help="engines of the tests' own process run in so many on a GPU"
    )
    parser.addoption("--any-method", action="store_true", help="GEMMs run by any of their methods, untimed")
    parser.addoption("--share", default="0/1", help="0/4: the first of four shares of these cases")


@pytest.fixture(scope="session", autouse=True)
def texts_of_random_models() -> Iterator[None]:
    """The random models of tests have few ids, and these are World's first, so that they have texts.

    The product takes a head with so few rows for one of another vocabulary; test_other_vocabularies.py
    looks at that.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "FEWEST_ROWS", 1)
        yield


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is left out is not even imported, unless it is named."""
    quick = config.getoption("--quick")
    if collection_path.is_dir():
        return True if quick and collection_path.name in THOROUGH else None
    if collection_path.suffix != ".py":  # it may be no text, as what an editor keeps beside a file
        return None
    text = collection_path.read_text(encoding="utf-8")
    if quick and MARKED.search(text):
        return True
    named = {Path(each.split("::")[0]).resolve() for each in config.args}
    needless = collection_path not in named and lacks_gpu(config) and NEEDS_GPU.search(text)
    return True if needless else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """The end of the log of each server that a test had is part of its failure."""
    report = yield
    if report.failed:
        for name, given in getattr(item, "funcargs", {}).items():
            if isinstance(given, Server):
                report.sections.append((f"log of {name}", given.log()[-LOG_SHOWN:]))
    return report


def pytest_collection_finish() -> None:
    MEMORY.begin()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """A process of the tests does not grow from file to file."""
    yield
    MEMORY.give_back(at_once=nextitem is None or nextitem.path != item.path)


def lacks_gpu(config: pytest.Config) -> bool:
    """Whether tests that need a GPU cannot run."""
    return not (torch.cuda.is_available() or config.getoption("--emulated"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    if lacks_gpu(config):
        leave_out_gpu(config, items)
    if config.getoption("--most-cases"):
        first, of = map(int, config.getoption("--share").split("/"))
        fewer_cases.keep(config, items, config.getoption("--most-cases"), (first, of))


def leave_out_gpu(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thousands, and skipping one takes as long as running a small test. Alone they stay, and say why."""
    here = [item for item in items if not item.get_closest_marker("gpu")]
    if here and len(here) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = here


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--emulated"):
        cuda_gpu.DEVICE, cuda_gpu.needs_gpu = "cpu", [pytest.mark.gpu]  # before the tests import them
    target = config.getoption("--portable")
    if target and not torch.version.hip:
        build.architecture = lambda gpu: build.portable_architecture(gpu, target)
    if config.getoption("--any-method"):
        autotune.Autotuner.measure = any_method
    if stages := config.getoption("--stages"):
        serving.on_cpu = ["--pp-devices", ",".join(["cpu"] * stages)]
        found = device.find_devices
        device.find_devices = lambda names: found(names) * (stages if names == "cpu" else 1)
    if gpu_stages := config.getoption("--gpu-stages"):
        gpus = [f"cuda:{number % torch.cuda.device_count()}" for number in range(gpu_stages)]
        of_gpus = device.find_devices
        device.find_devices = lambda names: of_gpus("+".join(gpus) if names in ("cpu", "cuda") else names)
        backends.StagedRunner = partial(backends.StagedRunner, groups=gpu_stages)
        groups.FEWEST_ROWS, groups.FEWEST_TOKENS, groups.CUT = 1, 8, 4
    if engines := config.getoption("--engines"):
        serving.on_cpu = ["--device", ",".join(["cpu"] * engines)]
    if given := config.getoption("--servers-on"):
        where, *flags = given.split()
        serving.on_cpu = serving_flags(where, flags)
        if "],[" in where or ("," in where and "[" not in where):
            serving.on_two = serving.on_cpu
    if config.getoption("--ahead"):
        backends.TorchRunner = LateRunner


def serving_flags(where: str, flags: Sequence[str]) -> list[str]:
    """Of a server on these devices. Several share a GPU, so each engine takes a part of it.

    Tests that compare texts need `--batch-invariant` among the flags, as rows round otherwise in batches of
    another size; tests of adapters cannot have it.
    """
    share = [] if "cpu" in where else ["--gpu-memory", str(ENGINE_GIB)]
    return ["--pp-devices" if where.startswith("[") else "--device", where, *share, *flags]


def any_method(tuner: autotune.Autotuner, sizes: Sequence[int], progress: bool = True) -> None:
    """In place of measuring: the same in each run, on any GPU and under any load."""
    for kind, tokens in product(KINDS, sizes):
        key = f"{kind} {tokens}"
        tuner.chosen[key] = Random(key).choice(tuner.gemms.candidates(kind, tokens))


@pytest.fixture(scope="session", autouse=True)
def unpacked_once() -> Iterator[None]:
    """The engines of a process share the tensors of the bundled model, which take most of their start."""
    whole = cache(unpack.tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpack, "tensors", lambda *path: dict(whole(*path)))
        yield
    if whole.cache_info().currsize:
        fresh = unpack.tensors()
        changed = [name for name, tensor in whole().items() if not torch.equal(tensor, fresh[name])]
        assert not changed, "somebody has written to what all share"


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> Iterator[None]:
    """httpx reads all certificates for every client, and for every call without one.

    That takes 20 ms of CPU time, where no server of tests has a certificate of theirs.
    """
    make, usual = ssl.create_default_context, {"cafile": certifi.where()}
    whole = cache(partial(make, **usual))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ssl, "create_default_context", lambda **given: whole() if given == usual else make(**given)
        )
        yield


@pytest.fixture(scope="module")
def own_tuning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For engines whose texts are compared: they run GEMMs by the same methods.

    Without it, what another process has timed since the first of them started may have changed those of the
    second, and a random number close to the border of two tokens then draws the other.
    """
    folder, shared = tmp_path_factory.mktemp("tuning"), autotune.Autotuner.from_cache

    def from_folder(gemms: Gemms, device: torch.device, step: autotune.Step) -> autotune.Autotuner:
        file = folder / shared(gemms, device, step).file.name
        return autotune.Autotuner(gemms, file, step, autotune.kept_in(file, gemms))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotune.Autotuner, "from_cache", from_folder)
        yield


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> "Reference":
    """The bundled model as the PyPI package `rwkv` runs it."""
    from reference import Reference  # which takes a second to import

    path = tmp_path_factory.mktemp("demo") / "model.pth"
    torch.save(unpack.tensors(), path)
    return Reference(path)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundled model on the CPU with a folder of batches, no password."""
    running = Server("--device", "cpu", "--batch-dir", str(tmp_path_factory.mktemp("batches")))
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture(scope="session")
def locked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundled model on the CPU with a folder of batches, password "open sesame"."""
    flags = ("--password", "open sesame", "--frontends", "1", "--batch-dir")
    running = Server("--device", "cpu", *flags, str(tmp_path_factory.mktemp("batches")))
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server without rows; a test takes a schema of its own (databases.py)."""
    programs = postgres_server.find()
    if programs is None:
        absent("There is no PostgreSQL; python test/helpers/postgres_server.py installs it.")
    with closing(PostgresServer(programs)) as running:
        yield running
