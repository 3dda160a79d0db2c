"""How the kernels are built and where they are kept, also where there is no GPU."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiled_once import complaints

from rwkv_batch.model.cuda.steps.graphs import decode_sizes
from rwkv_batch.ops.compiled import hip, kernel_cache, libraries
from rwkv_batch.ops.cuda import build


class TestWhatHasCompiled:
    """A compiler that counts its calls, and takes a file unless it or what it includes says "wrong"."""

    @pytest.fixture
    def compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("RWKV_BATCH_CACHE", str(tmp_path / "cache"))
        program = tmp_path / "compiler"
        program.write_text(
            f'#!/bin/sh\n[ "$1" != --version ] || exit 0\necho >> {tmp_path}/calls\n'
            f"! grep -q wrong {tmp_path}/*.cu* || {{ echo no >&2; exit 1; }}\n"
        )
        program.chmod(0o755)
        (tmp_path / "one.cu").write_text('#include "first.cuh"\n')
        (tmp_path / "first.cuh").write_text('#include "second.cuh"\n')
        (tmp_path / "second.cuh").write_text("fine\n")
        return str(program)

    def compiled(self, compiler: str, folder: Path, *flags: str) -> str:
        return complaints(compiler, list(flags), folder / "one.cu", folder / "out.o")

    def test_is_not_compiled_again(self, compiler, tmp_path):
        assert [self.compiled(compiler, tmp_path) for _ in range(3)] == [""] * 3
        assert (tmp_path / "calls").read_text() == "\n"

    @pytest.mark.parametrize("changed", ["one.cu", "first.cuh", "second.cuh", "flags"])
    def test_is_compiled_when_something_has_changed(self, compiler, tmp_path, changed):
        assert not self.compiled(compiler, tmp_path)
        if changed != "flags":
            with (tmp_path / changed).open("a") as file:
                file.write("more\n")
        assert not self.compiled(compiler, tmp_path, *(["-O1"] if changed == "flags" else []))
        assert (tmp_path / "calls").read_text() == "\n\n"

    def test_what_was_wrong_is_compiled_until_it_is_right(self, compiler, tmp_path):
        (tmp_path / "second.cuh").write_text("wrong\n")
        assert [self.compiled(compiler, tmp_path) for _ in range(2)] == ["no\n"] * 2
        (tmp_path / "second.cuh").write_text("right\n")
        assert not self.compiled(compiler, tmp_path)


def test_what_sources_distinguish():
    found = [
        line
        for file in sorted(build.SOURCES.glob("*.cu*"))
        for line in file.read_text().splitlines()
        if "__CUDA_ARCH__" in line
    ]
    asked = (
        "#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900",
        "#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900",
    )
    assert found and all(line in asked for line in found)


def test_a_path_may_hold_what_means_something_to_ninja(tmp_path, monkeypatch, nvcc):
    sources = tmp_path / "my models: RWKV" / "cuda"
    sources.mkdir(parents=True)
    for file in (*build.SOURCES.glob("*.cuh"), build.SOURCES / "sequence_feed.cu"):
        shutil.copy(file, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("RWKV_BATCH_CACHE", str(sources.parent / "build"))
    assert build.build("90a").is_file()


COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do [ "$1" != -shared ] || links=yes; shift; done
[ -z "$links" ] || { echo link >> "$LINKS"; cat "$GO" > /dev/null; }
echo whole > "$2"
"""


class TestTheCache:
    @pytest.fixture
    def environment(self, tmp_path: Path) -> dict[str, str]:
        """With a compiler that links when something is written to the pipe GO."""
        (tmp_path / "nvcc").write_text(COMPILER)
        (tmp_path / "nvcc").chmod(0o755)
        os.mkfifo(tmp_path / "go")
        places = {"RWKV_BATCH_CACHE": "cache", "LINKS": "links", "GO": "go"}
        paths = {name: str(tmp_path / place) for name, place in places.items()}
        return os.environ | paths | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def started(self, environment: dict[str, str]) -> subprocess.Popen:
        command = [sys.executable, "-m", "rwkv_batch.ops.cuda.build", "80"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=libraries.ROOT, env=environment, text=True, **pipes)

    def test_of_two_processes_one_builds_and_both_have_the_kernels(self, environment, tmp_path):
        left = tmp_path / "cache" / "kernels" / f"sm_80-{build.recipe('80').digest()}" / "building-killed"
        left.mkdir(parents=True)
        both = [self.started(environment) for _ in range(2)]
        with open(environment["GO"], "w") as go:  # which returns when one of them links
            assert any("waiting" in self.first_line(process) for process in both)
            assert not list(tmp_path.glob("cache/kernels/*/kernels.so"))
            go.write("go")
        printed = [process.communicate()[0].strip() for process in both]
        assert [process.returncode for process in both] == [0, 0]
        assert printed[0] == printed[1] and Path(printed[0]).read_text() == "whole\n"
        assert Path(environment["LINKS"]).read_text() == "link\n" and not left.exists()

    def first_line(self, process: subprocess.Popen) -> str:
        assert process.stderr
        return process.stderr.readline()

    @pytest.mark.parametrize(
        ("variables", "where"),
        [
            ({"RWKV_BATCH_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own/kernels"),
            ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/rwkv-batch/kernels"),
            ({"XDG_CACHE_HOME": "relative"}, "/home/somebody/.cache/rwkv-batch/kernels"),
            ({}, "/home/somebody/.cache/rwkv-batch/kernels"),
        ],
    )
    def test_it_is_where_the_environment_says(self, monkeypatch, variables, where):
        for name in ("RWKV_BATCH_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", "/home/somebody")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert kernel_cache.folder() == Path(where)

    def test_a_folder_that_cannot_be_written_is_named(self, environment, monkeypatch, tmp_path):
        (tmp_path / "cache").write_text("a file")
        done = self.started(environment)
        assert done.wait() and done.stderr
        (line,) = done.stderr.read().strip().splitlines()
        assert str(tmp_path / "cache") in line and "RWKV_BATCH_CACHE" in line

    def test_a_library_that_is_cut_short_is_named(self, monkeypatch, tmp_path):
        (tmp_path / "kernels.so").write_bytes(b"\x7fELF")
        monkeypatch.setattr(build, "build", lambda arch: tmp_path / "kernels.so")
        with pytest.raises(build.BuildError, match=r"kernels\.so cannot be loaded .*make kernels"):
            build.load("of-this-test")


def test_a_missing_compiler_is_one_sentence(monkeypatch):
    monkeypatch.setattr(build, "nvcc", lambda: None)
    with pytest.raises(build.BuildError, match="there is no nvcc"):
        build.build("00")


def test_a_missing_compiler_for_amd_is_one_sentence(monkeypatch):
    monkeypatch.setattr(build.hip, "command", lambda: None)
    with pytest.raises(build.BuildError, match=r"gfx000 .*there is no hipcc .*ROCm.*HIPCXX\.$"):
        build.build("gfx000")


def test_the_architecture_of_an_amd_gpu_is_the_name_of_its_instructions(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    named = SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: named)
    assert build.architecture(0) == "gfx90a"


@pytest.mark.parametrize("most", [1, 2, 3, 37, 320, 1000, 1024, 1500, 4000])
def test_the_ladder_ends_with_the_largest_batch_and_wastes_little(most):
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size < 2 * rows or size == 1
        assert size - rows < max(64, rows / 8 + 1)


def test_the_page_about_amd_gpus_names_every_file_that_is_compiled_for_them():
    named = set(re.findall(r"`((?:cuda|hip)/\w+\.cu)`", (libraries.ROOT / "hip" / "README.md").read_text()))
    assert {str(file.relative_to(libraries.ROOT)) for file in hip.sources()} == named


def test_the_page_about_kernels_names_every_file():
    page = (build.SOURCES / "README.md").read_text()
    assert [file.name for file in build.sources() if f"`{file.name}`" not in page] == []
