"""What generators of clients make of /openapi.json: every operation, without a warning."""

import json
import re
from pathlib import Path

import httpx
import pytest


@pytest.fixture(scope="module")
def document(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("openapi") / "openapi.json"
    path.write_text(httpx.get(f"{url}/openapi.json", timeout=60).text)
    return path


@pytest.fixture(scope="module")
def names(document: Path) -> list[str]:
    """The identity of each operation, as letters and digits."""
    paths = json.loads(document.read_text())["paths"].values()
    return [plain(each["operationId"]) for methods in paths for each in methods.values()]


def plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def checked(run, *files: Path) -> None:
    """TypeScript's compiler finds nothing wrong."""
    options = "--noEmit --strict --skipLibCheck --target es2022 --module esnext --moduleResolution bundler"
    done = run("tsc", *options.split(), *files)
    assert done.returncode == 0, done.stdout


def test_openapi_python_client(run, document: Path, names: list[str], tmp_path: Path):
    command = ("openapi-python-client", "generate", "--path", document, "--output-path", "made")
    done = run(*command, "--meta", "none", "--fail-on-warning")
    assert done.returncode == 0 and "warning" not in done.stdout.lower(), done.stdout + done.stderr
    modules = [path for path in (tmp_path / "made" / "api").rglob("*.py") if path.name != "__init__.py"]
    assert sorted(plain(path.stem) for path in modules) == sorted(names)
    (chat,) = [path for path in modules if plain(path.stem) == "postopenaiv1chatcompletions"]
    assert "Response[ChatCompletion | OpenAIError" in chat.read_text()


def test_openapi_typescript(run, document: Path, names: list[str], tmp_path: Path):
    done = run("openapi-typescript", document, "-o", "made.ts")
    assert done.returncode == 0 and "⚠" not in done.stdout + done.stderr, done.stdout + done.stderr
    text = (tmp_path / "made.ts").read_text()
    operations = text[text.index("export interface operations") :]
    assert sorted(map(plain, re.findall(r"^    (\w+): \{$", operations, re.M))) == sorted(names)
    body = re.search(r"^        ChatBody: \{$(.*?)^        \};$", text, re.M | re.S)
    assert body and not re.search(r"^            \w+: ", body[1], re.M), "no field of a chat is demanded"
    checked(run, tmp_path / "made.ts")


def test_hey_api(run, document: Path, names: list[str], tmp_path: Path):
    done = run("openapi-ts", "-i", document, "-o", "made")
    said = done.stdout + done.stderr
    assert done.returncode == 0 and not re.search("warn|unhandled|🚨|⚠", said, re.I), said
    text = (tmp_path / "made" / "sdk.gen.ts").read_text()
    assert sorted(map(plain, re.findall(r"^export const (\w+) = ", text, re.M))) == sorted(names)
    types = (tmp_path / "made" / "types.gen.ts").read_text()
    assert "200: ChatCompletion;" in types and "200: AnsweredMessage;" in types
    checked(run, tmp_path / "made" / "index.ts")
