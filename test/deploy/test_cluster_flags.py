"""What docs/cluster.md, serve.yaml and the chart start is what the programs take."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import helm_python
import pytest
import yaml
from serving import ROOT

from app import command_line
from deploy.check import DEPLOY

PAGE = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")


def of_page() -> list[str]:
    (line,) = (line for line in PAGE.splitlines() if line.strip().startswith(".venv/bin/python app.py"))
    return shlex.split(line.strip().partition(" > ")[0].replace("$i", "1"))[2:]


def of_serve() -> list[str]:
    config = yaml.safe_load((DEPLOY / "cluster/serve.yaml").read_text(encoding="utf-8"))
    flags = config["applications"][0]["args"]["flags"]
    return [str(word) for pair in flags.items() for word in pair if word is not None]


def of_chart() -> list[str]:
    chart = helm_python.Chart.load(str(DEPLOY / "helm"))
    texts = chart.render({"passwords": {"secret": "W"}}, name="r", namespace="n").values()
    objects = [each for text in texts for each in yaml.safe_load_all(text) if each]
    (server,) = (each for each in objects if each["kind"] == "StatefulSet")
    words: list[str] = server["spec"]["template"]["spec"]["containers"][0]["args"]
    return words


@pytest.mark.parametrize("words", [of_page, of_serve, of_chart], ids=["page", "serve.yaml", "chart"])
def test_a_server_takes_its_flags(words: Callable[[], list[str]], tmp_path: Path):
    (tmp_path / "password").write_text("W\n")
    secret = re.compile(r"(?<=-file=)/run/secrets/.*")  # which a pod has
    given = command_line().parse_args([secret.sub(f"{tmp_path}/password", word) for word in words()])
    assert given.state_db.startswith("postgresql://") and given.image_store


def test_other_programs_of_the_page_are_there_and_take_its_flags():
    """Those that do not run here, as they need Ray or HAProxy, are read."""
    found = re.findall(r"python (-m )?((?:deploy|bench|test)[\w./]+)([^`\n>]*)", PAGE)
    assert len(found) >= 5
    for module, program, words in found:
        file = ROOT / (program.replace(".", "/") + ".py" if module else program)
        taken = file.read_text(encoding="utf-8")
        assert [word for word in words.split() if word.startswith("--") and f'"{word}"' not in taken] == []


def test_the_servers_of_the_page_are_those_of_haproxys_file():
    ports = [f"800{number}" for number in (1, 2, 3)]
    assert "--port 800$i" in PAGE and "for i in 1 2 3" in PAGE
    file = (DEPLOY / "cluster/haproxy.cfg").read_text(encoding="utf-8")
    assert all(file.count(f"127.0.0.1:{port} ") == 2 for port in ports)
