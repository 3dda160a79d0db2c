"""The README and the pages of docs/ are true: their commands run as they stand there, and answer."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from serving import ROOT, Server

from app import command_line
from docs import make_lists

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TRANSLATIONS = [ROOT / "README.zh-CN.md"]
TEXT = "".join(page.read_text() for page in PAGES)


def examples(language: str) -> list[str]:
    """Each once, as a translation has those of its original."""
    texts = [TEXT, *(page.read_text() for page in TRANSLATIONS)]
    return list(dict.fromkeys(re.findall(rf"```{language}\n(.*?)```", "".join(texts), re.S)))


BLOCKS = ["\n" + block for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S)]
CURLS = [block for block in examples("sh") if "curl" in block]
PYTHONS = examples("python")
ANSWERS = {  # a word of a curl -> what its answer must hold
    "batch-translate": ["你好世界！", "早上好"],
    "DeepL-Auth-Key": ["Der Hund sieht das Haus.", '"results":[', '"to":"德语"', '"language":"de"'],
    '"glossary": {': ["Der Rüde sieht das Haus."],
    "/v2/glossaries": ['"glossary_id":"', '"entry_count":1'],
    "capital of France": ["Paris"],
    '7 + 5?\\n\\nAssistant:", "English': ["12", "Bonjour", "[DONE]"],
    "/pause": ['"paused":true', '"stopped":true', '"finish_reason":"paused"', "[DONE]"],
    '"echo"': ['"token_logprobs":[null,-', '"tokens":['],
    "/v2/chat": ["12", "Paris", "Bonjour"],
    'anna", "contents': ["Anna"],
    'ben", "contents': ["Ben", '"session_id":"ben-2","turn":1'],
    "Idempotency-Key": ['"turns":[{"turn":1,', '"created":'],
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
    '"prediction"': ["Once upon a time, there was a dog named Max.", '"finish_reason":"length"'],
    "/v1/models": ["rwkv7-demo"],
    "traceparent": ["Paris", "200 OK"],
    "/v1/files": ['"object":"list"'],
    "/health": ["ready"],
    "/health/live": ['{"status":"live"}', '{"status":"ready"}'],
    "names=vllm": ['vllm:kv_cache_usage_perc{engine="0",model_name="rwkv7-demo"} 0.0'],
    "/metrics\n": ['rwkv:num_requests_running{model_name="rwkv7-demo"}', '"avg_batch_size"'],
}


# A page waits for a second until its request runs, for which a busy machine may need longer.
SHELL = """set -e
curl() { command curl --fail-with-body -sS "$@"; }
runs() { curl URL/v1/server/status | grep -q '"request_id":"tale","rows"'; }
sleep() { until runs; do command sleep 0.05; done; }
"""


@pytest.mark.parametrize("block", CURLS)
def test_a_curl_answers(server: Server, block: str, tmp_path: Path):
    script = SHELL.replace("URL", server.url) + block.replace("http://127.0.0.1:8000", server.url)
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
    assert len(lines) == sum(block.count("\ncurl ") for block in BLOCKS) and all(
        line.startswith("ok ") for line in lines
    )
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


def test_the_first_answer_of_the_readme_is_that_of_its_first_curl(server: Server):
    readme = PAGES[0].read_text()
    shown = json.loads(re.findall(r"```json\n(.*?)```", readme, re.S)[0])
    asked = re.findall(r"/v1/chat/completions -d '(.*)'", readme)[0]
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=asked, timeout=60).json()
    assert answer == {**answer, **shown, "choices": [answer["choices"][0] | shown["choices"][0]]}


def test_the_readme_fits_a_screen():
    """Lines of text in front of the list of links."""
    first = PAGES[0].read_text().split("## More")[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 60


def test_the_commands_of_the_readme_that_start_a_server_are_those_of_make_and_the_parser():
    starts = [
        block.strip() for block in examples("sh") if "app.py" in block and block in PAGES[0].read_text()
    ]
    assert starts
    for command in starts:
        command_line().parse_args(command.split()[2:])
    outside = ("ARGS", "MFLAGS", "MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL")  # of a make that runs this test
    env = {name: value for name, value in os.environ.items() if name not in outside}
    made = subprocess.run(
        ["make", "-n", "serve"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    *_, last = made.stdout.strip().splitlines()
    assert last.split()[0].endswith("python") and last.split()[1:] == ["app.py"], last


@pytest.mark.parametrize(
    "page", [*PAGES, *TRANSLATIONS, *(ROOT / "bench/results").glob("*.md")], ids=lambda page: page.name
)
def test_rows_of_tables_have_as_many_cells_as_their_heads(page: Path):
    prose = re.sub(r"^\s*```.*?```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for table in re.findall(r"(?:^\|.*\n)+", prose, re.M):
        head, *rows = (len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines())
        assert set(rows) == {head}, table


@pytest.mark.parametrize("name", make_lists.PAGES)
def test_the_lists_are_what_the_server_has(name: str):
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == make_lists.pages()[name], "run python docs/make_lists.py"
