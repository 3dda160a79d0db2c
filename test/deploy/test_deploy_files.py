"""The files of deploy/ and the Dockerfile fit the server and each other."""

import http.client
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from dockerfile_parse import DockerfileParser
from serving import ROOT, Server

import app
from rwkv_batch import supervisor
from rwkv_batch.ops.cuda import build
from rwkv_batch.processes import health

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVER = COMPOSE["services"]["server"]
CUDA = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())["services"]["server"]
UNIT = (DEPLOY / "rwkv.service").read_text()
# What the server takes to end, at most: a drain, the last requests, and what is not stored yet.
STOPPING = app.parse([]).drain_seconds + supervisor.CUT_OFF_SECONDS + supervisor.SAVE_SECONDS


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage of the Dockerfile."""
    found: dict[str, list[tuple[str, str]]] = {}
    for each in DockerfileParser(path=str(ROOT)).structure:
        if each["instruction"] == "FROM":
            name = each["value"].split()[-1]
        if each["instruction"] not in ("COMMENT", "FROM"):
            found.setdefault(name, []).append((each["instruction"], each["value"]))
    return found


STAGES = stages()
LEFT_OUT = ("__pycache__", "*.pyc", "*.state")  # by .dockerignore, inside of folders


def value(stage: str, instruction: str) -> str:
    (only,) = [text for name, text in STAGES[stage] if name == instruction]
    return only


def copied(stage: str, to: Path) -> Path:
    """A folder with what a stage copies out of the repository."""
    allowed = (ROOT / ".dockerignore").read_text().split()
    for _, text in [pair for pair in STAGES[stage] if pair[0] == "COPY" and "--from" not in pair[1]]:
        *sources, target = text.split()
        for source in sources:
            assert f"!{source.split('/')[0]}" in allowed, f".dockerignore keeps {source} from the builder"
            place = to / target.strip("/").removeprefix(".")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns(*LEFT_OUT))
            else:
                folder = place if target.endswith("/") else place.parent
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, folder)
    return to


def options(words: list[str]) -> list[str]:
    """The flags of a command line that starts app.py."""
    return words[words.index("app.py") + 1 :]


def flags_of_compose(secrets: Path) -> list[str]:
    """The flags that compose gives where deploy/.env has the passwords W, whose files lie in this folder."""
    for name in SERVER["secrets"]:
        (secrets / name).write_text("W")
    command = SERVER["command"].replace("${RWKV_FLAGS:-}", "--model-path /models/rwkv7-g1-1.5b.pth")
    return command.replace("/run/secrets", str(secrets)).split()


def test_what_an_image_copies_is_a_server_that_answers(tmp_path: Path):
    """Its health check is content with this server, and not when it is down."""
    entry = " ".join(options(json.loads(value("base", "ENTRYPOINT"))))
    entry = (
        entry.replace("0.0.0.0", "127.0.0.1")
        .replace(" /data", f" {tmp_path}")
        .replace(" /models", f" {tmp_path}")
    )
    image = copied("source", tmp_path / "app")
    running = Server(*entry.split(), "--device", "cpu", "--frontends", "1", root=image)
    try:
        assert httpx.get(running.url + "/health", timeout=60).status_code == 200
        probe = json.loads(value("base", "HEALTHCHECK").partition("CMD ")[2])
        assert probe[0] == "python"
        # The port is not the one that is exposed, process 1 is no server here, and a proxy is no way to it.
        probe = [sys.executable, *probe[1:], str(running.process.pid)]
        proxy = os.environ | {
            name: "http://127.0.0.1:1" for name in ("http_proxy", "HTTP_PROXY", "all_proxy")
        }
        checked = subprocess.run(probe, cwd=image, env=proxy, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert (tmp_path / "sessions.db").exists()
    finally:
        assert running.stop() == 0, running.log()
    down = subprocess.run(probe, cwd=image, capture_output=True, text=True)
    assert down.returncode == 1 and "Traceback" not in down.stderr


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["python", "app.py", "--host", "0.0.0.0"], ("127.0.0.1", 8000)),
        (["python", "app.py", "--host", "0.0.0.0", "--host", "::", "--port=81"], ("::1", 81)),
        (["/sbin/docker-init", "--", "python", "/app/app.py", "--port", "9000"], ("127.0.0.1", 9000)),
        (["python", "app.py", "--password", "W", "--host", "10.0.0.9"], ("10.0.0.9", 8000)),
    ],
)
def test_the_health_check_asks_where_the_flags_let_the_server_listen(words, address, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "\0".join([*words, ""]))
    asked = []

    class Connection(http.client.HTTPConnection):
        def connect(self) -> None:
            asked.append((self.host, self.port))
            raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(http.client, "HTTPConnection", Connection)
    assert health.main([]) == 1 and asked == [address]


@pytest.mark.parametrize("stage", ["kernels", "source"])
def test_the_kernels_are_those_that_the_server_looks_for(stage: str, tmp_path: Path):
    """The name of a library has a digest of the files that it is made of."""
    code = "from rwkv_batch.ops.cuda import build; print(*[build.recipe(a).digest() for a in ('80', '90a')])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=copied(stage, tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [build.recipe(arch).digest() for arch in ("80", "90a")]


@pytest.mark.parametrize("stage", STAGES)
def test_the_builder_gets_what_a_stage_copies(stage: str, tmp_path: Path):
    copied(stage, tmp_path)


def test_images_can_keep_sessions_in_postgresql_and_send_traces():
    (install,) = [text for name, text in STAGES["base"] if name == "RUN" and "pip install" in text]
    assert {"requirements-cluster.txt", "requirements-traces.txt"} <= set(install.split())


def test_an_image_runs_as_a_user_in_whose_cache_the_kernels_are():
    assert {value(target, "USER") for target in ("cpu", "cuda")} == {"1000:1000"}
    assert "useradd --uid 1000 --create-home rwkv" in "".join(text for _, text in STAGES["base"])
    (kept,) = [text for name, text in STAGES["cuda"] if name == "COPY" and "--from=kernels" in text]
    assert ("ENV", "RWKV_BATCH_CACHE=/cache") in STAGES["kernels"]
    assert kept.split()[-2:] == ["/cache/kernels", "/home/rwkv/.cache/rwkv-batch/kernels"]


@pytest.mark.parametrize("target", [SERVER["build"]["target"], CUDA["build"]["target"]])
def test_compose_builds_a_target_that_there_is(target: str):
    assert target in STAGES and SERVER["build"]["context"] == ".."


def test_the_flags_are_those_of_the_server(tmp_path: Path):
    image = options(json.loads(value("base", "ENTRYPOINT")))
    config = app.parse([*image, *flags_of_compose(tmp_path)])
    assert config.frontend.password == config.frontend.metrics_password == "W"
    assert config.engines[0].model_path == "/models/rwkv7-g1-1.5b.pth"
    (start,) = [line for line in UNIT.splitlines() if line.startswith("ExecStart=")]
    given = start.replace("$RWKV_FLAGS", "--model-path x.pth --password W")
    assert app.parse(options(given.split())).engines[0].model_path == "x.pth"


def test_nothing_kills_a_server_that_drains():
    settings = dict(line.split("=", 1) for line in UNIT.splitlines() if "=" in line and line[0] != "#")
    assert float(settings["TimeoutStopSec"]) > STOPPING and settings["KillMode"] == "mixed"
    assert float(SERVER["stop_grace_period"].removesuffix("s")) > STOPPING


def test_what_compose_mounts_is_there_and_where_it_is_looked_for():
    services = COMPOSE["services"]
    mounts = {}
    for service in ("prometheus", "grafana"):
        for volume in services[service]["volumes"]:
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                assert (DEPLOY / source).is_file()
                mounts[target] = DEPLOY / source
            else:
                assert source in COMPOSE["volumes"]
    assert mounts["/etc/prometheus/prometheus.yml"] == DEPLOY / "prometheus.yml"
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["server:8000"]
    (secret,) = services["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert secret in SERVER["secrets"] and set(SERVER["secrets"]) == set(COMPOSE["secrets"])
    assert not any(each["environment"] in SERVER["command"] for each in COMPOSE["secrets"].values())
    provisioning = "/etc/grafana/provisioning"
    (source,) = yaml.safe_load(mounts[f"{provisioning}/datasources/rwkv.yaml"].read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load(mounts[f"{provisioning}/dashboards/rwkv.yaml"].read_text())["providers"]
    boards = [path for target, path in mounts.items() if target.startswith(provider["options"]["path"])]
    assert boards == [DEPLOY / "grafana" / "board.json"]
