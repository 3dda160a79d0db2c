"""Packages that only some servers need are missing, or there and broken: a sentence, and no traceback."""

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from app import parse
from routes.http.frontend import Frontend
from rwkv_batch import sessions
from rwkv_batch.config import EngineConfig, FrontendConfig
from rwkv_batch.engine.startup import open_store
from rwkv_batch.sampling import flashinfer
from rwkv_batch.sampling.flashinfer import SamplerError
from rwkv_batch.state.elsewhere.objects import Objects
from rwkv_batch.state.entries import StoreError

# What an import of one may raise, and how the sentence has it.
BROKEN = {
    "from fake_optional import nothing": "ModuleNotFoundError: No module named 'fake_optional'",
    "from json import nothing": "ImportError: cannot import name 'nothing'",
    "import ctypes; ctypes.CDLL('libnothing.so.5')": "OSError: libnothing.so.5: cannot open shared object",
    "import json; json.nothing": "AttributeError: module 'json' has no attribute 'nothing'",
    "def (": "SyntaxError: ",
    "raise RuntimeError('compiled for\\n  numpy 1.')": "RuntimeError: compiled for numpy 1)",
    "1 / 0": "ZeroDivisionError: division by zero",
}
URL, TRACES = "postgresql://h/d", ["--traces", "http://127.0.0.1:4318/v1/traces"]


def traces() -> None:
    try:
        parse(TRACES)
    except SystemExit as end:
        assert end.code == 2
        raise


def copies() -> None:
    with sessions.opened(URL, ""):
        pass


def draws() -> None:
    flashinfer.load(torch.device("cpu"), 8)


# What needs a package, its module, what it raises, and how the sentence begins.
NEEDED: dict[str, tuple[Callable[[], object], str, type[BaseException], str]] = {
    "a database": (
        lambda: open_store(EngineConfig(state_db=URL)),
        "psycopg",
        StoreError,
        "--state-db with a URL needs psycopg",
    ),
    "a copy": (copies, "psycopg", StoreError, "A URL needs psycopg"),
    "images": (
        lambda: Objects("s3://b/i", "x"),
        "fsspec",
        StoreError,
        "--image-store with a URL needs fsspec",
    ),
    "images of a kind": (
        lambda: Objects("s3://anna:geheim@b/i", "x"),
        "s3fs",
        StoreError,
        "--image-store s3://b/i needs s3fs",
    ),
    "chained images": (
        lambda: Objects("simplecache::s3://b/i", "x"),
        "s3fs",
        StoreError,
        "--image-store simplecache::s3://b/i needs s3fs",
    ),
    "spans": (traces, "opentelemetry", SystemExit, "argument --traces: this needs opentelemetry"),
    "a sampler": (draws, "flashinfer", SamplerError, "--sampler flashinfer needs flashinfer"),
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """Puts a package with this code first on the path."""

    def make(package: str, code: str) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(code + "\n")
        monkeypatch.syspath_prepend(tmp_path)

    return make


def said(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    """What a user is told."""
    written = capsys.readouterr().err
    assert "Traceback" not in written
    return written if isinstance(error, SystemExit) else str(error)


@pytest.mark.parametrize("code", BROKEN)
@pytest.mark.parametrize("needed", NEEDED)
def test_a_package_that_is_broken_is_named_with_its_error(
    needed: str, code: str, fake: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    use, package, kind, begins = NEEDED[needed]
    fake(package, code)
    with pytest.raises(kind) as refused:
        use()
    sentence = said(refused.value, capsys)
    assert "geheim" not in sentence
    if "fake_optional" in code:  # which is what has to be installed
        ways = "pip install -r requirements-", "needs a package that is not installed ("
        assert any(way in sentence for way in ways)
        return
    assert f"{begins}, which is installed but cannot be loaded ({BROKEN[code]}" in sentence
    assert re.search(r"\); pip install --force-reinstall (s3fs|-r requirements-\w+\.txt)\b", sentence)


@pytest.mark.parametrize("needed", NEEDED)
def test_a_package_that_is_missing_is_named(
    needed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use, package, kind, begins = NEEDED[needed]
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(kind) as refused:
        use()
    sentence = said(refused.value, capsys)
    if package == "s3fs":
        begins = begins.replace("s3fs", "a package that is not installed (Install s3fs")
        assert begins in sentence
    elif package == "opentelemetry":
        assert "OpenTelemetry is missing; pip install -r requirements-traces.txt" in sentence
    else:
        assert f"{begins}; pip install -r requirements-" in sentence


def test_a_package_without_a_module_of_its_own_is_broken_not_missing(
    fake: Callable[[str, str], None],
) -> None:
    """To install it would do nothing."""
    fake("psycopg", "import psycopg.pq")
    with pytest.raises(StoreError, match=r"installed but cannot be loaded .*force-reinstall"):
        open_store(EngineConfig(state_db=URL))


def test_a_front_end_whose_tracing_has_broken_since_the_start_serves_without(
    fake: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake("opentelemetry", "import json; json.nothing")
    monkeypatch.delitem(sys.modules, "routes.callers.tracing", raising=False)
    with caplog.at_level(logging.ERROR):
        front = Frontend(FrontendConfig(traces=TRACES[1]), None)
    assert front.tracing is None
    (line,) = caplog.messages
    assert "no spans are sent (AttributeError: " in line
    front.close()
