"""The command line: wrong flags and files end with one sentence and exit code 2, and nothing is
left behind.
"""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from checkpoints import write_pth
from serving import ROOT, Server, free_port, until

import rwkv_batch
from app import parse
from rwkv_batch.bundled import unpack


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Of rank 2, for the bundled model."""
    outputs, inputs = unpack.tensors()["blocks.0.ffn.key.weight"].shape
    key = "blocks.0.ffn.key"
    tensors = {f"{key}.lora_A": torch.ones(2, inputs), f"{key}.lora_B": torch.zeros(outputs, 2)}
    return write_pth(tmp_path / "louder.pth", tensors)


def app(*args: str, tmp: Path) -> subprocess.CompletedProcess:
    env = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp)}
    return subprocess.run(
        [sys.executable, "app.py", *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "args, names",
    [
        (["--port", "0"], "--port"),
        (["--port", "http"], "--port"),
        (["--host", "no such host"], "--host no such host"),
        (["--state-db", ""], "--state-db"),
        (["--max-rows", "0"], "--max-rows"),
        (["--max-rows", "many"], "--max-rows"),
        (["--drain-seconds", "-1"], "--drain-seconds"),
        (["--drain-seconds", "soon"], "--drain-seconds"),
        (["--wkv", "bf16"], "--wkv"),
        (["--password", ""], "--password"),
        (["--pp-devices", "0;1"], "--pp-devices"),
        (["--pp-devices", "[a]"], "--pp-devices"),
        (["--pp-devices", "[0]", "--device", "cpu"], "--device"),
        (["--log-level", "loud"], "--log-level"),
        (["--adapter-alpha", "half"], "--adapter-alpha"),
        (["--adapter-scaling", "nan"], "--adapter-scaling"),
        (["--chat-template", "chatml"], "--chat-template"),
        (["--sampling-profile", "wild"], "--sampling-profile"),
        (["--model", "x", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_a_wrong_flag_is_named(args: list[str], names: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        parse(args)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and names in line


@pytest.mark.parametrize(
    "args, names",
    [
        (["--max-rows", "0"], "--max-rows"),
        (["--models", "/nowhere"], "error: --models /nowhere is no folder"),
        (["--models", __file__], f"error: --models {__file__} is no folder"),
    ],
)
def test_a_wrong_flag_ends_the_process(args: list[str], names: str, tmp_path: Path):
    done = app(*args, tmp=tmp_path)
    assert done.returncode == 2
    assert names in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use_is_named(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = app("--port", port, tmp=tmp_path)
    assert done.returncode == 2
    assert port in done.stderr and "--port" in done.stderr and "Traceback" not in done.stderr


def test_a_checkpoint_that_cannot_be_served_is_named(tmp_path: Path):
    """One such file; test/unit/test_checkpoint.py has all kinds."""
    path = tmp_path / "broken.pth"
    path.write_bytes(b"PK\x03\x04 not a zip after all")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    options = ["--port", str(free_port()), "--device", "cpu", "--state-db", str(tmp_path / "db")]
    done = app("--model-path", str(path), *options, tmp=scratch)
    assert done.returncode == 2
    assert "broken.pth" in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: "), "a process warns as it is ended"
    assert not list(scratch.iterdir()), "temporary files stay behind"


def test_an_adapter_that_cannot_be_merged_is_named(adapter: Path, tmp_path: Path):
    """One such adapter; test/unit/test_adapters.py has all kinds."""
    options = ["--port", str(free_port()), "--device", "cpu", "--state-db", str(tmp_path / "db")]
    done = app("--adapter", str(adapter), *options, tmp=tmp_path)
    assert done.returncode == 2
    assert "--adapter-alpha" in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: "), "a process warns as it is ended"


def test_a_model_with_an_adapter_is_served_under_both_names(adapter: Path):
    flags = ("--device", "cpu", "--frontends", "1")
    server = Server(*flags, "--adapter", str(adapter), "--adapter-scaling", "0.5")
    try:
        (served,) = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
        assert served["id"] == "rwkv7-demo+louder"
        assert httpx.get(f"{server.url}/health", timeout=60).json()["model"] == "rwkv7-demo+louder"
    finally:
        server.stop()


def test_a_device_that_is_not_there_is_named(tmp_path: Path):
    done = app(
        "--device", "cuda:77", "--port", str(free_port()), "--state-db", str(tmp_path / "db"), tmp=tmp_path
    )
    assert done.returncode == 2
    assert "cuda:77" in done.stderr and "Traceback" not in done.stderr


def test_a_database_that_cannot_be_made_is_named(tmp_path: Path):
    done = app(
        "--state-db",
        str(tmp_path / "no" / "such" / "folder.db"),
        "--port",
        str(free_port()),
        "--device",
        "cpu",
        tmp=tmp_path,
    )
    assert done.returncode == 2
    assert str(tmp_path / "no" / "such") in done.stderr and "Traceback" not in done.stderr


def test_a_start_for_which_a_shared_database_is_away_may_be_repeated(tmp_path: Path):
    """It may be there soon, as where both machines were started together; a wrong flag stays wrong (2)."""
    pytest.importorskip("psycopg")
    options = ["--state-db", "postgresql://nobody@127.0.0.1:1/x", "--db-patience", "0", "--device", "cpu"]
    done = app(*options, "--image-store", str(tmp_path / "states"), "--port", str(free_port()), tmp=tmp_path)
    assert done.returncode == 1
    assert (
        "error: The database of sessions cannot be reached" in done.stderr and "Traceback" not in done.stderr
    )


def test_a_database_of_a_running_server_is_named(server: Server, tmp_path: Path):
    """It is known by another name of its file, and the running server goes on."""
    link, logged = tmp_path / "link.db", len(server.log())
    link.hardlink_to(Path(server.scratch) / "sessions.db")
    done = app("--state-db", str(link), "--port", str(free_port()), "--device", "cpu", tmp=tmp_path)
    link.unlink()
    assert done.returncode == 2
    assert f"{link} is in use by another server" in done.stderr and "Traceback" not in done.stderr
    body = {"session_id": "claimed", "contents": ["User: Hello\n\nAssistant:"], "max_tokens": 1}
    assert httpx.post(f"{server.url}/state/chat/completions", json=body, timeout=60).status_code == 200
    assert "damaged" not in server.log()[logged:]


def test_rows_that_do_not_fit_are_told_how_many_would(tmp_path: Path):
    done = app(
        "--max-rows",
        "100000000",
        "--port",
        str(free_port()),
        "--device",
        "cpu",
        "--state-db",
        str(tmp_path / "db"),
        tmp=tmp_path,
    )
    assert done.returncode == 2
    assert "--max-rows" in done.stderr and "Traceback" not in done.stderr


def test_help_names_every_flag_and_needs_no_model(tmp_path: Path):
    done = app("--help", tmp=tmp_path)
    assert done.returncode == 0
    assert all(
        flag in done.stdout
        for flag in (
            "--model-path",
            "--port",
            "--password",
            "--pp-devices",
            "--protect-translate",
            "--drain-seconds",
        )
    )


@pytest.mark.parametrize("command", [["app.py"], ["-m", "rwkv_batch"]])
def test_the_version_comes_from_one_place(command: list[str]):
    done = subprocess.run(
        [sys.executable, *command, "--version"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"rwkv-batch {rwkv_batch.__version__}\n")


def test_the_package_says_in_one_line_what_to_run():
    done = subprocess.run(
        [sys.executable, "-m", "rwkv_batch"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1 and "python app.py" in done.stdout


def test_the_command_line_needs_neither_torch_nor_robyn():
    code = "import sys, app; print([m for m in ('torch', 'robyn', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def announced(server: Server) -> str:
    """What the log says last of the start: a block between blank lines."""
    block = re.compile(r"\n\n(.*?\n  try  .*?\n)\n", re.S)
    until(lambda: block.search(server.log()) is not None)
    found = block.search(server.log())
    assert found
    return found[1]


def answered(command: str) -> str:
    command = command.replace("curl ", "curl -sS --fail-with-body ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_start_ends_with_an_address_the_page_and_a_command_that_is_answered(server: Server) -> None:
    block = announced(server)
    assert re.findall(r"  (ready on|page) +(\S+)\n", block) == [
        ("ready on", server.url),
        ("page", f"{server.url}/"),
    ]
    assert answered(re.findall(r"  try +(.*)\n", block)[0])


def test_with_a_password_the_command_has_a_place_for_it() -> None:
    server = Server("--device", "cpu", "--frontends", "1", "--password", "open sesame", "--no-page")
    block = announced(server)
    assert "open sesame" not in server.log() and "page" not in block
    command = re.findall(r"  try +(.*)\n", block)[0]
    assert answered(command.replace("PASSWORD", "open sesame"))
    assert server.stop() == 0
