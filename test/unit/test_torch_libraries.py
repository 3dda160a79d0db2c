"""Loading torch's libraries before torch is imported."""

import subprocess
import sys

import pytest

from rwkv_batch.ops import torch_libraries
from rwkv_batch.ops.torch_libraries import loading_libraries

pytestmark = pytest.mark.thorough

MAPPED = "[line.split()[-1] for line in open('/proc/self/maps') if line.rstrip().endswith('libtorch_cpu.so')]"


def run(code):
    code = f"from rwkv_batch.ops.torch_libraries import loading_libraries\n{code}"
    return subprocess.check_output([sys.executable, "-c", code], text=True).split()


def test_they_are_there_when_the_body_has_ended():
    code = f"with loading_libraries(): pass\nimport sys; print('torch' in sys.modules, len({MAPPED}) > 0)"
    assert run(code) == ["False", "True"]


def test_torch_takes_the_same_ones():
    code = f"with loading_libraries(): pass\nbefore = {MAPPED}\nimport torch\nprint(before == {MAPPED})\n"
    code += "print(int(torch.ones(3, 3).matmul(torch.ones(3)).sum()))"
    assert run(code) == ["True", "9"]


@pytest.mark.parametrize("origin", [None, "/nowhere/torch/__init__.py"])
def test_where_there_are_none_the_body_runs(origin, monkeypatch):
    spec = type("Spec", (), {"origin": origin})
    monkeypatch.setattr(torch_libraries, "find_spec", lambda name: origin and spec)
    ran = False
    with loading_libraries():
        ran = True
    assert ran


def test_without_a_thread_the_body_runs(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(torch_libraries.Thread, "start", start)
    ran = False
    with loading_libraries():
        ran = True
    assert ran


def test_an_error_of_the_body_is_raised():
    with pytest.raises(ValueError), loading_libraries():
        raise ValueError
