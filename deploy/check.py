#!/usr/bin/env python3
"""Check what is in deploy/ and the Dockerfile with the tools that read it.

    python deploy/check.py      as root on Debian: installs the tools it needs

nginx, HAProxy, promtool and systemd-analyze come from Debian, the others from requirements-dev.txt.
Where there is `docker compose`, it reads the compose files too. Exit code 1 if anything is wrong.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
UNPACKED = ROOT / "build" / "deploy-check"
PACKAGES = {
    "nginx": "nginx-light",
    "haproxy": "haproxy",
    "openssl": "openssl",
    "systemd-analyze": "systemd",
    "promtool": "prometheus",
}
PATH = os.pathsep.join(
    [
        str(Path(sys.executable).parent),
        str(UNPACKED / "usr" / "bin"),
        os.environ["PATH"],
        "/usr/sbin",
        "/sbin",
    ]
)
KUBERNETES = "1.34"  # whose schemas the chart's objects are held against
COMPOSE = (("compose.yaml",), ("compose.yaml", "compose.cuda.yaml"))


class MissingTool(Exception):
    """The message names the tool and says how to install it."""


def tool(name: str) -> str:
    """Path of a program. Raises MissingTool."""
    found = shutil.which(name, path=PATH)
    if found is None:
        how = (
            f"apt-get install {PACKAGES[name]}" if name in PACKAGES else "pip install -r requirements-dev.txt"
        )
        raise MissingTool(f"There is no {name}; run {how}, or make check-deploy as root on Debian.")
    return found


def answer(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    """What a checker complains about; empty if it is content."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr if done.returncode else ""


def dockerfile() -> str:
    return answer(tool("hadolint"), "--no-color", "Dockerfile")


def compose() -> str:
    """By the schema of the compose specification, and by docker compose itself where it is installed."""
    checker = tool("check-jsonschema")
    files = [f"deploy/{name}" for name in COMPOSE[-1]]
    said = answer(checker, "--builtin-schema", "vendor.compose-spec", *files)
    docker = shutil.which("docker")
    if docker is None or answer(docker, "compose", "version"):
        return said
    secrets = {name: "W" for name in ("RWKV_PASSWORD", "RWKV_METRICS_PASSWORD", "GRAFANA_PASSWORD")}
    for names in COMPOSE:
        given = [word for name in names for word in ("-f", f"deploy/{name}")]
        said += answer(docker, "compose", *given, "config", "--quiet", environment=secrets)
    return said


def prometheus() -> str:
    checker = tool("promtool")
    with tempfile.TemporaryDirectory() as folder:
        password = Path(folder) / "password"
        password.write_text("W", encoding="utf-8")
        config = (DEPLOY / "prometheus.yml").read_text(encoding="utf-8")
        file = Path(folder) / "prometheus.yml"
        file.write_text(config.replace("/run/secrets/metrics-password", str(password)), encoding="utf-8")
        return answer(checker, "check", "config", file)


def nginx() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return answer(*nginx_command(Path(folder)), "-t")


def nginx_command(folder: Path, *changes: tuple[str, str]) -> list[str]:
    """The command that runs deploy/nginx.conf in `folder`, with a certificate of its own and these changes.

    Raises MissingTool.
    """
    program, key, certificate = tool("nginx"), folder / "privkey.pem", folder / "fullchain.pem"
    request = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = answer(tool("openssl"), *request.split(), *names, "-keyout", key, "-out", certificate)
    assert not made, made
    site = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    for old, new in (("/etc/ssl/rwkv/", f"{folder}/"), ("/var/log/nginx/", f"{folder}/"), *changes):
        assert old in site, f"deploy/nginx.conf has no {old}"
        site = site.replace(old, new)
    (folder / "site.conf").write_text(site, encoding="utf-8")
    kept = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.geteuid() == 0 else ""  # whose certificate and folders these are
    main = f"{user}pid {folder}/pid;\nevents {{}}\nhttp {{\n{kept}include {folder}/site.conf;\n}}\n"
    (folder / "nginx.conf").write_text(main, encoding="utf-8")
    return [program, "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def haproxy() -> str:
    """The file for three servers as it stands."""
    return answer(tool("haproxy"), "-c", "-f", "deploy/cluster/haproxy.cfg")


VALUES: tuple[dict[str, object], ...] = (
    {},
    {
        "passwords": {"secret": "W", "clusterSecret": True},
        "servers": {"gpus": 0, "storageClass": "fast", "nodeSelector": {"a": "b"}},
    },
    {"autoscaling": {"enabled": False}, "serviceMonitor": {"enabled": False}, "servers": {"max": 40}},
)


def helm() -> str:
    """The chart by Helm itself; what it makes by the schemas of Kubernetes; its HAProxy's file by HAProxy."""
    try:
        import helm_python
        import kubernetes_validate
        import yaml
    except ImportError as error:
        raise MissingTool(f"There is no {error.name}; run pip install -r requirements-dev.txt.") from None
    folder, said = str(DEPLOY / "helm"), ""
    for values in VALUES:
        report = helm_python.lint(folder, values, strict=True)
        said += "".join(f"{each['error']}\n" for each in report["messages"] if each["severity"] > 1)
        said += "".join(report["errors"])
        chart = helm_python.Chart.load(folder)
        for name, text in chart.render(values, name="rwkv", namespace="models").items():
            for document in filter(None, yaml.safe_load_all(text)):
                try:
                    kubernetes_validate.validate(document, KUBERNETES, strict=True)
                except kubernetes_validate.SchemaNotFoundError:  # of an operator, not of Kubernetes
                    said += "" if document["kind"] == "ServiceMonitor" else f"{name}: no {document['kind']}\n"
                except kubernetes_validate.ValidationError as error:
                    said += f"{name}: {error.message}\n"
                if document["kind"] == "ConfigMap":
                    with tempfile.NamedTemporaryFile("w", suffix=".cfg", encoding="utf-8") as file:
                        file.write(document["data"]["haproxy.cfg"])
                        file.flush()
                        said += answer(tool("haproxy"), "-c", "-f", file.name)
    return said


def systemd() -> str:
    """The unit, as if the server lay where this checkout does."""
    checker = tool("systemd-analyze")
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder) / "rwkv.service"
        text = (
            (DEPLOY / "rwkv.service")
            .read_text(encoding="utf-8")
            .replace("/opt/rwkv-batch/.venv/bin/python", sys.executable)
        )
        unit.write_text(text.replace("/opt/rwkv-batch", str(ROOT)), encoding="utf-8")
        done = subprocess.run([checker, "verify", unit], capture_output=True, text=True)
        said = [
            line for line in done.stderr.splitlines() if "rwkv.service" in line
        ]  # not what else is installed
        return "\n".join(said) or (done.stderr if done.returncode else "")


CHECKS: tuple[Callable[[], str], ...] = (dockerfile, compose, prometheus, nginx, haproxy, helm, systemd)


def install() -> None:
    """The missing tools of Debian, if this may."""
    missing = {name: package for name, package in PACKAGES.items() if shutil.which(name, path=PATH) is None}
    if not missing or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    steps = []
    if "promtool" in missing:  # it is unpacked, as the whole package would start a service
        package = missing.pop("promtool")
        steps.append(f"apt-get download -q {package} && dpkg-deb -x {package}_*.deb . && rm {package}_*.deb")
    if missing:
        steps.append(f"apt-get install -y -q --no-install-recommends {' '.join(missing.values())}")
    UNPACKED.mkdir(parents=True, exist_ok=True)
    command = " && ".join(steps)
    for before in ("", "apt-get update -q && "):  # what apt knows may be missing or old
        done = subprocess.run(
            ["sh", "-c", before + command],
            # RUNLEVEL: that no service is started, as of HAProxy
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"},
            cwd=UNPACKED,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if done.returncode == 0:
            return


def main() -> None:
    install()
    problems = []
    for check in CHECKS:
        try:
            said = check()
        except MissingTool as missing:
            said = str(missing)
        print(f"{check.__name__}: {'wrong' if said else 'ok'}")
        problems += [f"{check.__name__}: {said}"] if said else []
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
