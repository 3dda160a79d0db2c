#!/usr/bin/env python3
"""The server's command line: flags become one frozen configuration, which the supervisor runs."""

import argparse
import logging
import socket
import sys
from dataclasses import fields
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, get_args

from rwkv_batch import __version__
from rwkv_batch.audit.lines import AuditError
from rwkv_batch.audit.log import AuditLog
from rwkv_batch.batches.store import BatchesError, BatchStore
from rwkv_batch.config import (
    MODEL_NAME,
    ActivationsName,
    EngineConfig,
    FrontendConfig,
    LogFormat,
    MetricNames,
    ProcessConfig,
    ServerConfig,
    WeightsName,
    file_name,
    further_model,
    has_password,
    is_url,
    without_adapter,
)
from rwkv_batch.flags import (
    CommandLine,
    collector,
    finite,
    glossary,
    named,
    not_understood,
    number,
    number_or_auto,
    password,
    port,
    seconds,
    secret,
)
from rwkv_batch.keys.ledger import Ledger, limits_file
from rwkv_batch.keys.records import Keyring, KeysError
from rwkv_batch.keys.usage import UsageStore, usage_file
from rwkv_batch.logs import begin_logging
from rwkv_batch.ops.compiled.gpu_context import count_gpus
from rwkv_batch.processes.streams import keep_streams
from rwkv_batch.supervisor import Supervisor, refuse

DEMO = Path(__file__).resolve().parent / "demo"  # the bundled model's folder
DEMO_ADAPTERS = 2
MOST_SECONDS, MOST_WORKERS = 86400, 1024
MOST_DRAFTED = 7  # a step then verifies 8 tokens
log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    config = parse(argv)
    keep_streams()
    if (folder := config.frontend.models) is not None and not Path(folder).is_dir():
        return refuse(f"--models {folder} is no folder; name one from which routes may load files")
    try:
        if config.frontend.keys is not None:
            check_keys(config.frontend.keys)
        if config.frontend.audit_log is not None:
            AuditLog(config.frontend.audit_log).close()
        if config.frontend.batch_dir is not None:
            BatchStore(config.frontend.batch_dir).close()
    except (KeysError, AuditError, BatchesError) as error:
        return refuse(str(error))
    begin_logging(config.log_level, config.log_format, "supervisor")
    if has_password(config.engines[0].state_db or ""):
        log.warning(
            "others see the password in --state-db; leave it out, and set PGPASSWORD or use ~/.pgpass"
        )
    return Supervisor(config).run()


def check_keys(path: str) -> None:
    """Raises KeysError if the file of keys, or one that belongs to it, cannot be used."""
    Keyring(path)
    UsageStore(usage_file(path)).close()
    Ledger(limits_file(path)).close()


def parse(argv: list[str]) -> ServerConfig:
    """The configuration that the command line asks for. What is wrong with it ends the process (code 2)."""
    parser = command_line()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(not_understood(parser, unknown))
    _choose_defaults(options)
    options.devices = _devices(parser, options)
    options.device = options.devices[0]
    try:
        options.host = socket.getaddrinfo(options.host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        parser.error(
            f"--host {options.host} is no address of this machine; use 127.0.0.1, or 0.0.0.0 for every "
            "network"
        )
    if options.replay_on_new_model and not options.token_log:
        parser.error("--replay-on-new-model reads tokens, and --no-token-log stores none; give one of them")
    if options.draft_model is not None and not (options.draft_model and options.speculate):
        parser.error(
            "--draft-model guesses what rows may draw; name a model with it, and say how many tokens with "
            "--speculate"
        )
    if options.batch_dir == "":
        parser.error("--batch-dir is empty; name a folder, or leave it out")
    if not options.state_db:
        parser.error("--state-db is empty; name a file, or :memory: for sessions that end with the server")
    if is_url(options.state_db) and not options.token_log:
        parser.error(
            "--no-token-log stores states, and PostgreSQL holds tokens; name a file with --state-db, or "
            "store tokens"
        )
    _check_password(parser, "--password", options.password, "for a server without one")
    _check_password(parser, "--metrics-password", options.metrics_password, "and --password counts")
    _check_password(
        parser, "--admin-password", options.admin_password, "and its routes answer to this machine only"
    )
    _check_password(parser, "--cluster-secret-file", options.cluster_secret, "and servers read tokens")
    _choose_cluster(parser, options)
    return ServerConfig(
        engines=_engines(parser, options),
        frontend=FrontendConfig(**_fields(FrontendConfig, options)),
        devices=options.devices,
        hung_seconds=options.hung_seconds,
        frontends=options.frontends,
        drain_seconds=options.drain_seconds,
        log_level=options.log_level,
        log_format=options.log_format,
    )


def _choose_defaults(options: argparse.Namespace) -> None:
    """The bundled model comes with a start state and an adapter to try, which routes load."""
    bundled = not options.model_path
    if bundled and options.models is None:
        options.models = str(DEMO)
    if options.max_adapters is None:
        wanted = bundled and not options.batch_invariant
        options.max_adapters = DEMO_ADAPTERS if wanted else EngineConfig.max_adapters


def _choose_cluster(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What servers that share a database have to know of each other."""
    store = options.image_store or ""
    if store and not is_url(options.state_db):
        parser.error(f"--image-store {store} is for servers that share a database; name one with --state-db")
    if options.cluster_secret is None:
        if options.cluster_address is not None:
            parser.error("--cluster-address is for servers with a secret; give --cluster-secret-file as well")
        return
    if not is_url(options.state_db):
        parser.error("--cluster-secret-file is for servers that share a database; name one with --state-db")
    if options.cluster_address is None:
        if ip_address(options.host).is_unspecified:
            parser.error(
                f"--host {options.host} is no address at which other servers reach this one; name that with "
                "--cluster-address"
            )
        host = f"[{options.host}]" if ":" in options.host else options.host
        options.cluster_address = f"{host}:{options.port}"
    name, _, number = options.cluster_address.rpartition(":")
    if not name or not (number.isascii() and number.isdecimal() and 0 < int(number) < 65536):
        parser.error(f"--cluster-address {options.cluster_address} is not HOST:PORT, such as 10.0.0.1:8000")


def _check_password(parser: argparse.ArgumentParser, flag: str, password: str | None, without: str) -> None:
    """without: what holds if it is left out."""
    if password is None:
        return
    if not password:
        parser.error(f"{flag} is empty; leave it out, {without}")
    if password != password.strip() or not (password.isascii() and password.isprintable()):
        parser.error(
            f"{flag} must be ASCII without spaces around it; nothing else arrives in an Authorization header"
        )


def command_line() -> argparse.ArgumentParser:
    """Every flag but --pp-devices sets the field of a configuration that has its name, or that of `dest`."""
    parser = CommandLine(prog="app.py", description="RWKV-7 inference server.", allow_abbrev=False)
    for config in (EngineConfig, FrontendConfig, ServerConfig):
        parser.set_defaults(**vars(config()))
    parser.set_defaults(state_db="rwkv_sessions.db")  # an offline engine opens no file unless it is given one
    parser.set_defaults(capture_late=True)  # which an offline engine does before its first rows
    parser.set_defaults(max_adapters=None)  # which depends on the model
    count, positive, auto = number(0), number(1), number(0) | {"type": partial(number_or_auto, 0)}
    any_number: dict[str, Any] = {"type": finite, "metavar": "X"}
    file: dict[str, Any] = {"type": named, "metavar": "FILE"}
    megabytes, gigabytes = number(1, unit=1 << 20), number(1, unit=1 << 30)
    flag = parser.add_argument
    flag("--version", action="version", version=f"rwkv-batch {__version__}")
    flag(
        "--model-path",
        metavar="[NAME=]P",
        action="append",
        help="a checkpoint: .pth, .safetensors or .st file, suffix optional, or a Hugging Face folder; given "
        "again for further models, which requests name in `model` (default: the bundled model)",
    )
    flag(
        "--weights",
        choices=get_args(WeightsName),
        help="round the large matrices of all models to this format, after adapters are merged (default: "
        "as in the file)",
    )
    flag(
        "--quantize-head",
        action=argparse.BooleanOptionalAction,
        help="whether --weights changes the last matrix too, which gives the logits: to int8 with every "
        "format of 8 bits and fewer, never to less (default: yes, but not with fewer than 8 bits)",
    )
    flag(
        "--activations",
        choices=get_args(ActivationsName),
        help="round the inputs of matrices in int8, int4 or int4-128 too, in steps of more than 64 tokens on "
        "a Hopper GPU, and multiply with copies of the matrices in fp8: faster, less exact, and a byte more "
        "a parameter (default: no; with --weights fp8 it is so anyway)",
    )
    flag(
        "--adapter",
        **file,
        help="LoRA, DoRA, PiSSA, Bone, DiSHA, MiSS, MoLE or whole tensors, merged into the first model "
        "(default: none)",
    )
    flag(
        "--adapter-alpha",
        **any_number,
        help="of the adapter's training; divided by its rank it is the scaling",
    )
    flag("--adapter-scaling", **any_number, help="of the adapter, in place of alpha")
    flag("--adapter-init", **file, help="what PiSSA began with, which is taken out of the model")
    flag(
        "--max-adapters",
        **count,
        help=f"adapters of requests that run at once (default {EngineConfig.max_adapters}; for the bundled "
        f"model {DEMO_ADAPTERS})",
    )
    flag("--max-adapter-rank", **positive, help="of these adapters, at most 256 (default %(default)s)")
    flag("--adapter-cache-mb", **count, help="host memory for loaded adapters (default %(default)s)")
    flag(
        "--mole-router",
        choices=("topk0", "shared"),
        help="the rule by which an adapter with experts chooses them, which its file does not say",
    )
    flag("--host", type=named, help="where to listen; 0.0.0.0 is every network (default %(default)s)")
    flag("--port", type=port, help="of all front ends (default %(default)s)")
    password(parser, "--password", "asked for on every route but translation, /health and / (default: none)")
    password(
        parser,
        "--admin-password",
        "asked for in place of --password on routes that load files (default: those answer to this machine "
        "only)",
    )
    password(
        parser,
        "--metrics-password",
        "asked for in place of --password on /metrics and /stats (default: none)",
    )
    flag(
        "--keys",
        **file,
        help="keys of clients with limits of their own, made by python -m rwkv_batch.keys; taken beside "
        "--password, which sees what belongs to all (default: none)",
    )
    flag(
        "--audit-log",
        **file,
        help="note each request that runs there, with hashes of its texts and of the line before; "
        "python -m rwkv_batch.audit verifies it (default: none)",
    )
    flag(
        "--traces",
        type=collector,
        metavar="URL",
        help="send spans of requests to this collector, such as http://127.0.0.1:4318/v1/traces, by OTLP "
        "over HTTP; needs requirements-traces.txt (default: none)",
    )
    flag(
        "--metric-names",
        choices=get_args(MetricNames),
        help="of /metrics; vllm: those of vLLM where the meaning is the same, as /metrics?names=vllm has "
        "(default %(default)s)",
    )
    flag(
        "--models",
        type=named,
        metavar="DIR",
        help="the folder from which routes may load files (default: none; for the bundled model its own)",
    )
    flag(
        "--page",
        action=argparse.BooleanOptionalAction,
        help="answer browsers at / with a page to try the server; --no-page lists the routes (default on)",
    )
    flag(
        "--protect-translate",
        action="store_true",
        help="ask for the password on /translate and the other routes of translators too",
    )
    flag(
        "--glossary",
        type=glossary,
        metavar="FILE",
        help="terms that translations must have, one a line: source, tab, target (default: none)",
    )
    flag(
        "--device",
        help="auto, cpu, cuda or cuda:1; several, as in cuda:0,cuda:1, or all: an engine on each, with all "
        "models (default %(default)s)",
    )
    flag(
        "--backend",
        choices=("auto", "torch", "portable"),
        help="what computes: own kernels, or slow torch operations; portable: the kernels for AMD "
        "GPUs, to test them on an NVIDIA GPU (default %(default)s)",
    )
    flag(
        "--pp-devices",
        metavar="LIST",
        nargs="+",
        default=[],
        help="the GPU to use, 0 or [0], or those that divide the layers: [0,1]",
    )
    flag("--gpu-memory", **gigabytes, help="GiB of the GPU to use, CUDA's own 0.5 besides (default: all)")
    flag(
        "--max-rows",
        **positive | {"type": partial(number_or_auto, 1)},
        help="rows of a model that run at once; auto: by the memory, as the log says. With 8 or fewer, "
        "int8 on a Hopper GPU is laid out for few rows (default auto)",
    )
    flag("--max-waiting", **positive, help="rows that may wait before 429 (default %(default)s)")
    flag("--prefill-tokens", **positive, help="prompt tokens a step (default: what suits the device)")
    flag(
        "--speculate",
        **number(0, most=MOST_DRAFTED),
        help="tokens a row that a step may verify of a draft: of text that its prompt, its answer or its "
        "prediction has; the answers stay the same (default %(default)s: none)",
    )
    flag(
        "--draft-model",
        metavar="P",
        help="a smaller model with the same vocabulary that guesses for the first one where its text has no "
        "draft; on a CPU or an NVIDIA GPU; needs --speculate (default: none)",
    )
    flag(
        "--threads",
        **number(1, most=MOST_WORKERS),
        help="of a step on a CPU; more than one needs cores that nothing else uses (default: one for a model "
        "below 64M parameters, else as many as cores)",
    )
    flag(
        "--batch-invariant",
        action="store_true",
        help="the same answer, bit for bit, beside any other rows and at any cut of its prompt; slower",
    )
    flag(
        "--wkv",
        choices=("fp16", "fp32"),
        help="how the recurrent state is stored (default fp32 on a CPU, fp16 on a GPU)",
    )
    flag(
        "--sampler",
        choices=("own", "flashinfer"),
        help="what draws for /v2; flashinfer needs requirements-cuda.txt and a GPU (default %(default)s)",
    )
    flag(
        "--state-db",
        metavar="FILE|URL",
        help="where sessions are stored; those of a further model in a file beside it with its name; "
        ":memory: stores none on the disk; postgresql://...: in a database that servers share (default "
        "%(default)s)",
    )
    flag(
        "--image-store",
        type=named,
        metavar="DIR|URL",
        help="with a database at a URL: the folder on this server's disk for states, or a store in which "
        "servers share them, such as s3://bucket/prefix (default: where it is started)",
    )
    flag(
        "--cluster-secret-file",
        type=secret,
        dest="cluster_secret",
        metavar="FILE",
        help="a file whose one line is what servers that share a database give states to each other for "
        "(default: none, and they read tokens)",
    )
    flag(
        "--cluster-address",
        metavar="HOST:PORT",
        help="where the other servers reach this one (default: --host and --port)",
    )
    flag(
        "--db-patience",
        **number(0, most=MOST_SECONDS),
        help="seconds that a database at a URL may be away before turns get 503 (default %(default)s)",
    )
    flag("--l1", **auto, help="states of a model's sessions kept on the device (default auto: by its memory)")
    flag(
        "--l2",
        **auto,
        help="states of a model's sessions kept in host memory (default auto: an eighth for all)",
    )
    flag(
        "--l3-gb",
        **gigabytes,
        dest="l3_bytes",
        help="size of the databases of all models, in equal parts; stored states go first, then the oldest "
        "sessions (default: half of what is free on the disk)",
    )
    flag(
        "--durable",
        action=argparse.BooleanOptionalAction,
        help="commit a turn before its last event; --no-durable writes behind (default on)",
    )
    flag(
        "--token-log",
        action=argparse.BooleanOptionalAction,
        help="store the tokens of sessions; --no-token-log stores their states only (default on)",
    )
    flag(
        "--replay-tokens",
        **positive,
        help="most tokens of a session that are read again to continue it (default %(default)s)",
    )
    flag(
        "--replay-on-new-model",
        action="store_true",
        help="continue sessions of another model with the same vocabulary, by reading their tokens",
    )
    flag("--prefix-cache-mb", **count, help="memory for beginnings of prompts (default %(default)s)")
    flag(
        "--chat-template",
        choices=("auto", "world", "g1", "g1c"),
        help="the prompts that the checkpoint was trained on; auto: by its name (default %(default)s)",
    )
    flag(
        "--keep-blank-lines",
        action="store_true",
        help="leave blank lines in messages of chats, for a checkpoint that was trained so",
    )
    flag(
        "--sampling-profile",
        choices=("default", "open_think", "fake_think", "tools"),
        help="how chats are drawn where a request does not say it (default %(default)s)",
    )
    flag(
        "--batch-dir",
        metavar="DIR",
        help="where /v1/files and /v1/batches keep files of requests and what came of them (default: there "
        "are none)",
    )
    flag(
        "--batch-gb",
        **gigabytes,
        dest="batch_bytes",
        help=f"size of such files, at most; others get 413 (default {FrontendConfig.batch_bytes >> 30})",
    )
    flag("--batch-days", **positive, help="until a file or batch is removed (default %(default)s)")
    workers = number(1, most=MOST_WORKERS)
    flag("--frontends", **workers, help="HTTP processes that share the port (default: by cores)")
    flag(
        "--hung-seconds",
        **number(0, most=MOST_SECONDS),
        help="until an engine that makes no step is started again; 0: never (default %(default)s)",
    )
    flag(
        "--drain-seconds",
        **number(0, most=MOST_SECONDS),
        help="how long running requests may go on after SIGTERM or Ctrl-C (default %(default)s)",
    )
    time: dict[str, Any] = {"type": seconds, "metavar": "SECONDS"}
    flag(
        "--header-timeout",
        **time,
        help="for the head of a request, from its first byte; then 408 (default %(default)g; 0: no limit)",
    )
    flag(
        "--body-timeout",
        **time,
        help="between two bytes of a body, and of 500 bytes a second after so long; then 408 (default "
        "%(default)g)",
    )
    flag(
        "--keep-alive-timeout",
        **time,
        help="until a connection that asks for nothing is closed (default %(default)g)",
    )
    flag(
        "--send-timeout",
        **time,
        help="in which a client reads nothing of its reply; then its request ends (default %(default)g)",
    )
    flag(
        "--max-connections",
        **positive,
        help="of each front end; silent ones end for new ones, else these get 503 (default %(default)s)",
    )
    flag(
        "--max-body-mb",
        **megabytes,
        dest="max_body",
        help=f"larger request bodies get 413 (default {FrontendConfig.max_body >> 20})",
    )
    flag(
        "--max-state-mb",
        **megabytes,
        dest="max_state",
        help=f"larger files of sessions and batches get 413 (default {FrontendConfig.max_state >> 20})",
    )
    flag(
        "--log-level",
        type=str.upper,
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="of what is logged; no prompt, text or password is (default %(default)s)",
    )
    flag(
        "--log-format",
        choices=get_args(LogFormat),
        help="lines of text, or of JSON with key, tokens and times of each request (default %(default)s)",
    )
    return parser


def _engines(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[EngineConfig, ...]:
    """One for each --model-path; what is merged into a model goes into the first."""
    named = [_named_path(parser, text) for text in options.model_path or []]
    names = [name or file_name(path) for name, path in named]
    for name in names:
        if names.count(name) > 1:
            parser.error(f"--model-path: two models are called {name}; name one of them with NAME=P")
    options.model_name, options.model_path = named[0] if named else (None, None)
    first = EngineConfig(**_fields(EngineConfig, options))
    return first, *(further_model(without_adapter(first), path, name) for name, path in named[1:])


def _named_path(parser: argparse.ArgumentParser, text: str) -> tuple[str | None, str]:
    """Of NAME=P. A path may hold an equals sign too, behind a slash or where it exists."""
    if not text:
        parser.error("--model-path is empty; name a model, or leave it out for the bundled one")
    name, equals, path = text.partition("=")
    if not equals or "/" in name or Path(text).exists():
        return None, text
    if not path or not MODEL_NAME.fullmatch(name):
        parser.error(
            f"--model-path {text} is not NAME=P; a name has letters, digits and -._ only, and no space"
        )
    return name, path


def _fields(config: type[ProcessConfig], options: argparse.Namespace) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(config)}


def _devices(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[str, ...]:
    """One for each engine."""
    if options.pp_devices:
        return _pipeline_devices(parser, options)
    if options.device == "all":
        if count := count_gpus():
            return tuple(f"cuda:{number}" for number in range(count))
        parser.error("--device all: no GPU is found here; name devices, such as cpu")
    devices = tuple(name.strip() for name in options.device.split(","))
    if not all(devices):
        parser.error(f"--device {options.device} has an empty name in it; write cuda:0,cuda:1")
    return devices


def _pipeline_devices(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[str, ...]:
    """`--pp-devices` is written `[0,1]`, `0,1` or `0 1`: `cuda:0+cuda:1`. A CPU is named `cpu`.

    `[0,1],[2,3]` are two engines of two stages each.
    """
    text = " ".join(options.pp_devices)
    groups = [group.strip(" [],").replace(",", " ").split() for group in text.split("]") if group.strip(" ,")]
    if (
        not groups
        or not all(groups)
        or not all(n.isdecimal() or n == "cpu" for group in groups for n in group)
    ):
        parser.error(f"--pp-devices {text} is no list of GPU numbers; write [0] or 0")
    if options.device not in ("auto", "cuda"):
        parser.error(
            f"--pp-devices {text} and --device {options.device} both name a device; give one of them"
        )
    return tuple("+".join(n if n == "cpu" else f"cuda:{n}" for n in group) for group in groups)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
