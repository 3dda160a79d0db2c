"""`python -m rwkv_batch.evaluate`, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from serving import ROOT, Server

from rwkv_batch.evaluate.__main__ import main

LINES = {
    "lambada": {"text": "The capital of France is Paris"},
    "mmlu": {"question": "What is 1 + 1?", "choices": ["1", "2", "3", "4"], "answer": 1, "subject": "maths"},
    "perplexity": {"text": "The capital of France is Paris"},
}


def command(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    run = [sys.executable, "-m", "rwkv_batch.evaluate", *arguments]
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run(run, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_a_run_shows_a_bar_a_table_and_writes_lines(tmp_path: Path):
    done = command("generate", "--device", "cpu", "--count", "6", "--max-tokens", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("answers_*.jsonl")
    *records, last = map(json.loads, file.read_text().splitlines())
    assert [record["index"] for record in records] == list(range(6))
    assert set(records[0]) >= {"prompt", "response", "tokens", "finish_reason", "timestamp"}
    assert last["summary"]["questions"] == 6 and "rwkv7-demo" in last["summary"]["model"]
    assert "| questions" in done.stdout and file.name in done.stdout


@pytest.mark.parametrize("task", LINES)
def test_a_file_here_and_behind_a_url_gives_the_same(server: Server, tmp_path: Path, capsys, task):
    file, found = tmp_path / "examples.jsonl", []
    file.write_text("\n".join([json.dumps(LINES[task])] * 3))
    for where in (["--device", "cpu"], ["--url", server.url]):
        out = tmp_path / "out.jsonl"
        assert main([task, str(file), "--limit", "2", "--jsonl", str(out), *where]) == 0
        *records, last = map(json.loads, out.read_text().splitlines())
        assert len(records) == 2 and last["summary"].pop("model") and last["summary"].pop("task") == task
        found.append((records, last["summary"]))
        assert "| value" in capsys.readouterr().out
    for here, there in zip(*([*records, summary] for records, summary in found), strict=True):
        assert here == {
            name: pytest.approx(v, rel=1e-3) if type(v) is float else v for name, v in there.items()
        }


def test_next_tokens_of_ones_own_prompts(capsys):
    assert main(["next-token", "--device", "cpu", "--top", "2", "The capital of France is", "1, 2,"]) == 0
    out = capsys.readouterr().out
    assert "after 'The capital of France is'" in out and "after '1, 2,'" in out
    assert sum(line.startswith("| '") for line in out.splitlines()) == 4


def test_a_number_that_is_none_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["next-token", "--top", "0"])
    assert "argument --top: '0' is no whole number of 1 or more" in capsys.readouterr().err


def test_what_differs_is_the_exit_code(capsys):
    code = main(["determinism", "--device", "cpu", "--count", "3", "--max-tokens", "4", "--temperature", "0"])
    out = capsys.readouterr().out
    same = [line.split("|")[2].strip() for line in out.splitlines() if line.startswith("| same")]
    assert code == (0 if same == ["3", "3"] else 1) and same[0] == "3"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lambada", "missing.jsonl"], "missing.jsonl"),
        (["next-token", "--model-path", "missing.pth"], "missing.pth"),
        (["next-token", "--url", "http://127.0.0.1:9"], "does not answer"),
        (["next-token", "--device", "cpu", ""], "empty"),
    ],
)
def test_what_cannot_be_evaluated_is_one_sentence(capsys, arguments, words):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert words in shown.err and shown.err.count("\n") == 1 and not shown.out


def test_a_file_that_cannot_be_written_leaves_the_table(tmp_path: Path, capsys):
    assert main(["next-token", "--device", "cpu", "--jsonl", str(tmp_path), "Hi"]) == 2
    shown = capsys.readouterr()
    assert "after 'Hi'" in shown.out and shown.err.endswith(
        f"{tmp_path} cannot be written (Is a directory).\n"
    )


@pytest.mark.parametrize(
    "arguments", [[], ["lambada"], ["generate", "--count", "0"], ["mmlu", "x", "--limit", "a"]]
)
def test_wrong_flags_are_explained(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and "usage" in capsys.readouterr().err
