"""What --model-path makes of the configuration."""

import sys

import pytest

from app import parse
from rwkv_batch.config import has_password
from rwkv_batch.engine.startup import open_store
from rwkv_batch.state.elsewhere.objects import Objects
from rwkv_batch.state.entries import StoreError


def engines(*args: str) -> list[tuple[str | None, str | None, str | None]]:
    """Name, path and database of each model."""
    return [(e.model_name, e.model_path, e.state_db) for e in parse(list(args)).engines]


def test_without_a_model_there_is_the_bundled_one():
    assert engines() == [(None, None, "rwkv_sessions.db")]


def test_each_model_has_its_name_and_a_database_of_its_own(tmp_path):
    database = str(tmp_path / "s.db")
    given = ("--state-db", database, "--model-path", "a.pth", "--model-path", "big=/x/b.safetensors")
    assert engines(*given, "--model-path", "/y/rwkv7-g1-2.9b.pth") == [
        (None, "a.pth", database),
        ("big", "/x/b.safetensors", str(tmp_path / "s.big.db")),
        (None, "/y/rwkv7-g1-2.9b.pth", str(tmp_path / "s.rwkv7-g1-2.9b.db")),
    ]


def test_a_path_may_hold_an_equals_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x=y.pth").touch()
    assert [e[:2] for e in engines("--model-path", "x=y.pth", "--model-path", "/a=b/c.pth")] == [
        (None, "x=y.pth"),
        (None, "/a=b/c.pth"),
    ]


def test_an_adapter_is_merged_into_the_first_model_only():
    options = parse(["--model-path", "a", "--model-path", "b", "--adapter", "x", "--adapter-alpha", "8"])
    assert [(e.adapter, e.adapter_alpha) for e in options.engines] == [("x", 8.0), (None, None)]


WRONG = [[""], ["my model=x.pth"], ["=x.pth"], ["a="], ["a.pth", "b/a.pth"], ["b", "b=c"]]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_name_is_refused(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        parse([word for path in wrong for word in ("--model-path", path)])
    assert ended.value.code == 2 and "--model-path" in capsys.readouterr().err


def test_sessions_in_memory_have_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ("--state-db", ":memory:", "--model-path", "a.pth", "--model-path", "b.pth")
    assert engines(*given) == [(None, "a.pth", ":memory:"), (None, "b.pth", ":memory:")]
    assert [open_store(config) for config in parse(list(given)).engines] == [None, None]
    assert list(tmp_path.iterdir()) == []


def test_a_database_without_a_name_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--state-db", ""])
    assert ended.value.code == 2 and "error: --state-db is empty" in capsys.readouterr().err


NAMES = ["--adapter", "--adapter-init", "--audit-log", "--cluster-secret-file", "--host", "--image-store"]
NAMES += ["--keys", "--models", "--admin-password-file"]


@pytest.mark.parametrize("flag", NAMES)
def test_an_empty_name_is_refused(flag, capsys):
    """As of a variable that is not set, in a script: "" is the folder in which the server is started."""
    with pytest.raises(SystemExit) as ended:
        parse([f"{flag}="])
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(
        f"error: argument {flag}: this is empty"
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--model", "x"], "there is no flag --model; did you mean --model-path or --models?"),
        (["--state_db=x"], "there is no flag --state_db; did you mean --state-db?"),
        (["--pasword", "W"], "there is no flag --pasword; did you mean --password"),
        (["--zzz"], "there is no flag --zzz; --help lists them all"),
        (["-p", "8000"], "there is no flag -p;"),
        (["model.pth"], "model.pth belongs to no flag; a value follows its flag"),
    ],
)
def test_a_flag_that_is_not_there_is_answered_with_those_like_it(wrong, said, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(wrong)
    assert ended.value.code == 2 and f"error: {said}" in capsys.readouterr().err


def test_tokens_that_are_not_stored_are_not_replayed(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--no-token-log", "--replay-on-new-model"])
    assert (
        ended.value.code == 2 and "error: --replay-on-new-model" in capsys.readouterr().err.splitlines()[-1]
    )


def test_metrics_may_have_a_password_of_their_own():
    given = parse(["--password", "all", "--metrics-password", "figures"]).frontend
    assert (given.password, given.metrics_password) == ("all", "figures")
    assert parse(["--password", "all"]).frontend.metrics_password is None


PASSWORDS = ["--password", "--metrics-password", "--admin-password"]


@pytest.mark.parametrize("flag", PASSWORDS)
def test_a_password_may_be_in_a_file(flag, tmp_path, capsys):
    file = tmp_path / "password"
    file.write_text("open sesame\n")
    given = parse([f"{flag}-file", str(file)])
    assert getattr(given.frontend, flag.removeprefix("--").replace("-", "_")) == "open sesame"
    for words in ([flag, "W", f"{flag}-file", str(file)], [f"{flag}-file", str(tmp_path / "missing")]):
        with pytest.raises(SystemExit) as ended:
            parse(words)
        assert ended.value.code == 2 and f"error: argument {flag}-file: " in capsys.readouterr().err


def test_a_password_file_may_begin_with_a_byte_order_mark(tmp_path):
    """As some editors write one; a client would have to send it, and cannot."""
    file = tmp_path / "password"
    file.write_text("open sesame\r\n", encoding="utf-8-sig")
    assert parse(["--password-file", str(file)]).frontend.password == "open sesame"


@pytest.mark.parametrize("flag", ["--password-file", "--glossary"])
def test_a_file_that_cannot_be_read_is_named_once(flag, tmp_path, capsys):
    for file, why in ((tmp_path, "Is a directory"), (tmp_path / "missing", "No such file or directory")):
        with pytest.raises(SystemExit):
            parse([flag, str(file)])
        (line,) = capsys.readouterr().err.splitlines()
        assert line.count(str(file)) == 1 and f"({why})" in line


@pytest.mark.parametrize("contents", ["", "\n", "one\ntwo\n", "\xff"])
def test_a_file_without_a_password_is_refused(contents, tmp_path, capsys):
    file = tmp_path / "password"
    file.write_text(contents, encoding="latin-1")
    with pytest.raises(SystemExit) as ended:
        parse(["--password-file", str(file)])
    assert ended.value.code == 2 and f"error: argument --password-file: {file} " in capsys.readouterr().err


def test_states_are_not_stored_in_place_of_tokens_in_postgresql(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--no-token-log", "--state-db", "postgresql://h/d"])
    assert ended.value.code == 2 and "error: --no-token-log stores states" in capsys.readouterr().err


def test_models_share_a_database_at_a_url(tmp_path):
    config = parse(["--model-path", "a.pth", "--model-path", "b=c.pth", "--state-db", "postgresql://h/d"])
    assert [(each.state_db, each.state_model) for each in config.engines] == [
        ("postgresql://h/d", ""),
        ("postgresql://h/d", "b"),
    ]


@pytest.mark.parametrize(
    ("database", "has"),
    [
        ("sessions.db", False),
        ("x:y@z", False),
        ("postgresql://ben@h/d", False),
        ("postgresql://h:5432/a@b:c", False),
        ("postgresql://ben:W@h/d", True),
        ("postgres://ben:@@h", True),
        ("postgresql:///d?host=/run&password=W", True),
    ],
)
def test_a_password_that_others_see_is_found(database, has):
    assert has_password(database) == has


@pytest.mark.parametrize("flag", PASSWORDS)
@pytest.mark.parametrize("wrong", ["", " a", "é", "a\n"])
def test_a_password_that_no_header_carries_is_refused(flag, wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        parse([flag, wrong])
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and f"error: {flag} " in said


@pytest.mark.parametrize(
    ("flag", "most"),
    [
        ("--threads", "1024"),
        ("--frontends", "1024"),
        ("--drain-seconds", "86400"),
        ("--max-rows", "2147483647"),
        ("--prefill-tokens", "2147483647"),
        ("--adapter-alpha", "1e+30"),
    ],
)
def test_what_is_too_large_is_refused(flag, most, capsys):
    parse([flag, most])
    with pytest.raises(SystemExit) as ended:
        parse([flag, "1" + "0" * 31])
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and f"{flag}: 1" in said and f" use {most} or less" in said


@pytest.mark.parametrize("flags", [["--draft-model", "a"], ["--draft-model", "", "--speculate", "3"]])
def test_a_draft_model_is_named_with_the_length_of_its_drafts(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and "error: --draft-model " in said and "--speculate" in said


def test_the_first_model_has_the_draft_model():
    flags = ["--model-path", "a", "--model-path", "b", "--draft-model", "c", "--speculate", "3"]
    assert [each.draft_model for each in parse(flags).engines] == ["c", None]


def test_weights_are_those_of_all_models():
    flags = ["--model-path", "a", "--model-path", "b", "--weights", "int4-128", "--quantize-head"]
    for engine in parse(flags).engines:
        assert (engine.weights, engine.quantize_head) == ("int4-128", True)
    assert (parse([]).engines[0].weights, parse([]).engines[0].quantize_head) == (None, None)


def test_a_format_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--weights", "int3"])
    assert "int4-128" in capsys.readouterr().err


def test_blank_lines_of_chats_are_kept_if_the_operator_says_so():
    assert parse(["--keep-blank-lines"]).frontend.keep_blank_lines
    assert not parse([]).frontend.keep_blank_lines


SHARED = "--state-db", "postgresql://u@h/d"


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret"
    file.write_text("s" * 32 + "\n")
    return "--cluster-secret-file", str(file)


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        (("--host", "127.0.0.1", "--port", "8001"), "127.0.0.1:8001"),
        (("--host", "::1", "--port", "8001"), "[::1]:8001"),
        (("--host", "0.0.0.0", "--cluster-address", "server-1:80"), "server-1:80"),
    ],
)
def test_other_servers_reach_this_one_where_it_listens(secret, flags, address):
    config = parse([*SHARED, *secret, *flags])
    assert config.engines[0].cluster_address == address
    assert config.engines[0].cluster_secret == config.frontend.cluster_secret == "s" * 32
    assert "sss" not in repr(config)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((*SHARED, "SECRET", "--host", "0.0.0.0"), "name that with --cluster-address"),
        ((*SHARED, "SECRET", "--cluster-address", "server-1"), "is not HOST:PORT"),
        (("SECRET",), "name one with --state-db"),
        ((*SHARED, "--cluster-address", "a:1"), "give --cluster-secret-file"),
        (("--image-store", "s3://bucket"), "name one with --state-db"),
        (("--image-store", "states"), "name one with --state-db"),
    ],
)
def test_what_servers_cannot_share_is_refused(secret, flags, sentence, capsys):
    words = [word for flag in flags for word in (secret if flag == "SECRET" else (flag,))]
    with pytest.raises(SystemExit):
        parse(words)
    assert sentence in capsys.readouterr().err


def test_a_package_that_is_missing_is_named_with_its_requirements(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("opentelemetry", "fsspec")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("opentelemetry", "fsspec"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit):
        parse(["--traces", "http://127.0.0.1:4318/v1/traces"])
    assert "OpenTelemetry is missing; pip install -r requirements-traces.txt" in capsys.readouterr().err
    with pytest.raises(StoreError, match=r"needs fsspec; pip install -r requirements-cluster\.txt\.$"):
        Objects("s3://bucket/images", "some")
