"""The README is true: its commands run as they stand there, and answer."""
import re
import subprocess
import sys

import pytest
from serving import ROOT, Server

README = (ROOT / "README.md").read_text()
CURLS = [block for block in re.findall(r"```sh\n(.*?)```", README, re.S) if "curl" in block]
PYTHONS = re.findall(r"```python\n(.*?)```", README, re.S)
ANSWERS = {  # a word of a curl -> what its answer must hold
    "batch-translate": ["你好世界！", "早上好"],
    "system": ["Paris"],
    "contents": ["12", "Bonjour", "[DONE]"],
    "Japan": ["Tokyo"],
    "batch-FIM": ["a + b"],
    "/v1/models": ["rwkv7-demo"],
    "/health": ["ready"],
}


@pytest.mark.parametrize("block", CURLS)
def test_a_curl_answers(server: Server, block: str):
    script = 'set -e\ncurl() { command curl --fail-with-body -sS "$@"; }\n' + block.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [text for word, texts in ANSWERS.items() if word in block for text in texts]
    assert expected, "a curl of the README without an answer to check"
    for text in expected:
        assert text in done.stdout


@pytest.mark.parametrize("block", PYTHONS)
def test_a_python_example_prints_text(server: Server, block: str):
    done = subprocess.run([sys.executable, "-c", block.replace("http://127.0.0.1:8000", server.url)],
                          cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 3
