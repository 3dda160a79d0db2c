"""The README is true: its commands run as they stand there, and answer. So do examples of docs/."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving import ROOT, Server

README = (ROOT / "README.md").read_text()
CURLS = [block for block in re.findall(r"```sh\n(.*?)```", README, re.S) if "curl" in block]
CLIENTS = (ROOT / "docs" / "clients.md").read_text()
PYTHONS = re.findall(r"```python\n(.*?)```", README + CLIENTS, re.S)
ANSWERS = {  # a word of a curl -> what its answer must hold
    "batch-translate": ["你好世界！", "早上好"],
    "You are a helpful": ["Paris"],
    '7 + 5?\\n\\nAssistant:", "English': ["12", "Bonjour", "[DONE]"],
    "/pause": ['"paused":true', '"finish_reason":"length"', "[DONE]"],
    '"echo"': ['"token_logprobs":[null,-', '"tokens":['],
    "/v2/": ["12", "Paris", "Bonjour"],
    'anna", "contents': ["Anna"],
    "tree": ["Paris", "deleted successfully"],
    "/v1/responses": ["Paris", "completed"],
    "Japan": ["Tokyo"],
    "/v1/messages": ["Paris", "end_turn"],
    "/api/generate": ["12", '"done":true'],
    "/infill": ["a + b", '"stop":true'],
    "/openapi.json": ['"openapi":"3.1.0"'],
    "guided_choice": ["ly", '"finish_reason":"stop"'],
    "pirate": ["Arr! 23 + 45 = 68 Ahoy, matey!", "法国的首都是巴黎。", "Reykjavik", "removed successfully"],
    "batch-FIM": ["a + b"],
    "/v1/models": ["rwkv7-demo"],
    "/health": ["ready"],
    "/metrics": ['rwkv:num_requests_running{model_name="rwkv7-demo"}', '"avg_batch_size"'],
}


@pytest.mark.parametrize("block", CURLS)
def test_a_curl_answers(server: Server, block: str, tmp_path: Path):
    script = 'set -e\ncurl() { command curl --fail-with-body -sS "$@"; }\n' + block.replace(
        "http://127.0.0.1:8000", server.url
    )
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [text for word, texts in ANSWERS.items() if word in block for text in texts]
    assert expected, "a curl of the README without an answer to check"
    for text in expected:
        assert text in done.stdout


def test_the_curl_script_runs_them_all_with_a_password(locked_server: Server):
    done = subprocess.run(
        [ROOT / "test" / "test_curl.sh", locked_server.url, "open sesame"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == README.count("\ncurl ") and all(line.startswith("ok ") for line in lines)
    wrong = subprocess.run(
        [ROOT / "test" / "test_curl.sh", locked_server.url, "wrong"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert wrong.returncode == 1 and "FAIL" in wrong.stdout


@pytest.mark.parametrize("block", PYTHONS)
def test_a_python_example_prints_text(server: Server, block: str):
    done = subprocess.run(
        [sys.executable, "-c", block.replace("http://127.0.0.1:8000", server.url)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 3
