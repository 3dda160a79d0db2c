"""The commands of docs/keys.md run one after the other as they stand there, on the server that it starts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from serving import ROOT, Server

from rwkv_batch.audit.__main__ import main as audit

PAGE = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE.replace(".venv/bin/python", "python"), re.S)


def test_the_commands_of_the_page(tmp_path: Path, capsys):
    (start,) = [number for number, block in enumerate(BLOCKS) if "app.py" in block]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def run(blocks: list[str]) -> str:
        """In one shell, whose variables are kept for the next call."""
        script = "\n".join(
            ["set -e", f'python() {{ "{sys.executable}" "$@"; }}', *blocks, "declare -p > variables"]
        )
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    listed = run(BLOCKS[:start])
    assert "alice    taken" in listed and "60 requests/min; 1000000 tokens/day; 8 rows" in listed
    words = [str(tmp_path / word) if "." in word else word for word in BLOCKS[start].split()[2:]]
    server = Server("--device", "cpu", "--frontends", "2", *words)
    keep = "source <(grep -E '^declare -- (ALICE|ADMIN)=' variables)"
    rest = [block.replace("http://127.0.0.1:8000", server.url) for block in BLOCKS[start + 1 :]]
    said = run([keep, *rest])
    assert server.stop() == 0, server.log()
    assert "Paris" in said and "x-ratelimit-remaining-requests: 59" in said.lower()
    assert '"object":"usage","key":"alice"' in said and "2099" not in said
    assert "1 lines, none changed" in said
    fields = [json.loads(line) for line in server.log().splitlines()]
    assert any(each["message"] == f"ready on {server.url}" for each in fields)
    (entry,) = [each for each in fields if "model" in each]
    for name in re.findall(r"`(\w+)`", PAGE.split("## Access log")[1].split("## Audit log")[0]):
        assert name in entry
    (tmp_path / "audit.jsonl").write_bytes(b"{}\n")
    assert audit(["verify", str(tmp_path / "audit.jsonl")]) == 1
    capsys.readouterr()


def test_the_page_names_every_flag_of_add():
    command = [sys.executable, "-m", "rwkv_batch.keys", "add", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for flag in set(re.findall(r"--[a-z-]+", shown)) - {"--help"}:
        assert f"`{flag}" in PAGE
