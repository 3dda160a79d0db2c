"""The README and the pages of docs/ are true: their commands run as they stand there, and answer."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving import ROOT, Server

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TRANSLATIONS = [ROOT / "README.zh-CN.md"]
TEXT = "".join(page.read_text() for page in PAGES)


def examples(language: str) -> list[str]:
    """Each once, as a translation has those of its original."""
    texts = [TEXT, *(page.read_text() for page in TRANSLATIONS)]
    return list(dict.fromkeys(re.findall(rf"```{language}\n(.*?)```", "".join(texts), re.S)))


CURLS = [block for block in examples("sh") if "curl" in block]
PYTHONS = examples("python")
ANSWERS = {  # a word of a curl -> what its answer must hold
    "batch-translate": ["你好世界！", "早上好"],
    "You are a helpful": ["Paris"],
    '7 + 5?\\n\\nAssistant:", "English': ["12", "Bonjour", "[DONE]"],
    "/pause": ['"paused":true', '"finish_reason":"length"', "[DONE]"],
    '"echo"': ['"token_logprobs":[null,-', '"tokens":['],
    "/v2/": ["12", "Paris", "Bonjour"],
    'anna", "contents': ["Anna"],
    'ben", "contents': ["Ben", '"session_id":"ben-2","turn":1'],
    "export?": ["Eve", "deleted successfully"],
    "tree": ["Paris"],
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
    assert expected, "a curl without an answer to check; add one to ANSWERS"
    for text in expected:
        assert text in done.stdout


def test_the_curl_script_runs_them_all_with_a_password(locked_server: Server):
    def run(password: str) -> subprocess.CompletedProcess[str]:
        # it shows the beginning of each reply, which may end inside of a character
        command = [ROOT / "test" / "test_curl.sh", locked_server.url, password]
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)

    done = run("open sesame")
    lines = done.stdout.strip().split("\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == TEXT.count("\ncurl ") and all(line.startswith("ok ") for line in lines)
    wrong = run("wrong")
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


def anchors(page: Path) -> set[str]:
    """The names under which GitHub links to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *TRANSLATIONS], ids=lambda page: page.name)
def test_a_link_leads_somewhere(page: Path):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}#{anchor}, no heading"
