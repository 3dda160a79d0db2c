"""Keeping the bytecode of modules where packages have none."""

import os
import py_compile
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from rwkv_batch.ops.compiled import bytecode

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["plain/__init__", "plain/part", "alone"]
CODE = (
    "from rwkv_batch.ops.compiled.bytecode import keep_bytecode; keep_bytecode('plain'); import plain, alone"
)


@pytest.fixture
def packages(tmp_path):
    """A folder with the package `plain`, and a module."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/__init__.py").write_text("from plain import part")
    (tmp_path / "plain/part.py").write_text("")
    (tmp_path / "alone.py").write_text("")
    return tmp_path


def start(packages, code=CODE, **environment):
    """Run it, and return which modules of that folder have bytecode: beside the sources, and in the cache."""
    environment |= {"PYTHONPATH": f"{packages}{os.pathsep}{ROOT}"}
    environment = {"RWKV_BATCH_CACHE": str(packages / "cache"), "PATH": os.environ["PATH"]} | environment
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    cached = packages / "cache/bytecode" / str(packages).lstrip("/")
    beside = [name for name in NAMES if Path(cache_from_source(packages / f"{name}.py")).exists()]
    kept = [name for name in NAMES if (cached / f"{name}.{sys.implementation.cache_tag}.pyc").exists()]
    return beside, kept


def test_what_python_may_not_write_is_kept_in_the_cache(packages):
    beside, kept = start(packages, PYTHONDONTWRITEBYTECODE="1")
    assert beside == [] and kept == NAMES


def test_a_later_start_reads_it(packages):
    start(packages, PYTHONDONTWRITEBYTECODE="1")
    code = f"{CODE}; import importlib; loader = plain.part.__spec__.loader; "
    code += "loader.source_to_code = None; importlib.reload(plain.part)"  # which compiling would call
    start(packages, code, PYTHONDONTWRITEBYTECODE="1")


def test_a_package_that_changes_is_compiled_again(packages):
    start(packages, PYTHONDONTWRITEBYTECODE="1")
    (packages / "plain/part.py").write_text("found = 1")
    start(packages, f"{CODE}; assert plain.part.found == 1", PYTHONDONTWRITEBYTECODE="1")


def test_a_package_with_bytecode_needs_no_other(packages):
    py_compile.compile(str(packages / "plain/__init__.py"))
    assert start(packages, PYTHONDONTWRITEBYTECODE="1") == (["plain/__init__"], [])


def test_python_writes_it_itself_where_it_may(packages):
    assert start(packages)[1] == []


def test_the_place_that_the_user_has_named_stays(packages):
    named = {"PYTHONPYCACHEPREFIX": str(packages / "own"), "PYTHONDONTWRITEBYTECODE": "1"}
    assert start(packages, **named) == ([], [])


def test_a_folder_that_this_user_may_not_write_to(packages, monkeypatch):
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("RWKV_BATCH_CACHE", str(packages / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(bytecode.os, "access", lambda path, mode: False)
    bytecode.keep_bytecode("plain")
    assert sys.pycache_prefix == str(packages / "cache/bytecode")


def test_compiled_ahead(packages):
    """Though this process has imported it already, as the one that builds kernels has torch."""
    code = "from rwkv_batch.ops.compiled.bytecode import compile_ahead; import plain; compile_ahead('plain')"
    assert start(packages, code, PYTHONDONTWRITEBYTECODE="1") == ([], NAMES[:2])


def test_nothing_is_imported_ahead_where_bytecode_is_written_anyway(packages):
    code = "from rwkv_batch.ops.compiled.bytecode import compile_ahead; compile_ahead('plain')"
    assert start(packages, code) == ([], [])


def test_without_the_package_nothing_changes(monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", None)
    bytecode.keep_bytecode("no_such_package")
    assert sys.pycache_prefix is None


def test_no_place_for_a_cache(packages, monkeypatch):
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("RWKV_BATCH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    bytecode.keep_bytecode("plain")
    assert sys.pycache_prefix is None and sys.dont_write_bytecode
