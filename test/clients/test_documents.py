"""The examples of docs/ for clients that are in this environment only: they run as they stand there."""

import re
import sys

import pytest
from asked import CLAUDE_CODE
from serving import ROOT

TEXT = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
CLIENTS = ("claude -p", "codex exec")  # commands
PYTHONS = re.findall(r"```py\n(.*?)```", TEXT, re.S)
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.S)
SHELLS = [block for block in BLOCKS if any(name in block for name in CLIENTS)]


def at(url: str, block: str) -> str:
    return block.replace("http://127.0.0.1:8000", url)


@pytest.mark.parametrize("block", PYTHONS)
def test_an_example_answers(run, url: str, block: str):
    done = run(sys.executable, "-c", at(url, block), LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert done.returncode == 0 and "Paris" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("block", SHELLS)
def test_a_command_answers(run, url: str, block: str):
    done = run("bash", "-e", "-c", at(url, block), **CLAUDE_CODE)
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr


def test_all_examples_for_clients_run():
    """Those in `python` and with curl run in the tests of the server."""
    page = (ROOT / "docs" / "clients.md").read_text()
    blocks = re.findall(r"^```(\S*)\n(.*?)^```", page, re.S | re.M)
    run_here = [block for _, block in blocks if block in PYTHONS + SHELLS]
    elsewhere = [text for kind, text in blocks if kind == "python" or (kind == "sh" and "curl" in text)]
    assert len(run_here) + len(elsewhere) == len(blocks) and len(run_here) > 3
