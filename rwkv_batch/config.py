"""The configuration of every process, where each default is written once. Imports nothing heavy."""

import re
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal

LogFormat = Literal["text", "json"]
SamplerName = Literal["own", "flashinfer"]
MoleRouter = Literal["topk0", "shared"]
BackendName = Literal["auto", "torch", "portable"]
WeightsName = Literal["fp16", "bf16", "int8", "fp8", "fp6", "fp5", "int4", "int4-128", "nf4"]
ActivationsName = Literal["fp8"]
IN_MEMORY = ":memory:"  # in place of a database's file: sessions end with the engine
URLS = ("postgresql://", "postgres://")  # what those of databases begin with
MODEL_NAME = re.compile(r"[\w.-]+")  # that somebody gives to a model
ChatTemplateName = Literal["auto", "world", "g1", "g1c"]
MetricNames = Literal["rwkv", "vllm"]
SamplingProfileName = Literal["default", "open_think", "fake_think", "tools"]


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """What every process of the server has."""

    log_level: str = "INFO"
    log_format: LogFormat = "text"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ProcessConfig):
    """The engine, in a process of its own or offline. None: what suits the device and the model."""

    model_path: str | None = None  # a file or Hugging Face folder; None: the bundled model
    model_name: str | None = None  # by which requests choose it; None: that of the file
    weights: str | None = None  # a WeightsName, the format of the large matrices; None: as in the file
    quantize_head: bool | None = None  # whether the head is in it too; None: as suits the format
    # An ActivationsName: what many rows multiply with matrices of 8 and 4 bits; None: as suits the format
    activations: str | None = None
    adapter: str | None = None  # a file that is merged into the model
    adapter_alpha: float | None = None  # of its training; divided by the rank it is the scaling
    adapter_scaling: float | None = None  # in place of alpha
    adapter_init: str | None = None  # the file of what PiSSA began with
    max_adapters: int = 0  # of requests, on the device at once; 0: requests have none
    max_adapter_rank: int = 64  # of these
    adapter_cache_mb: int = 4096  # host memory for those that are loaded; the others are read again
    mole_router: MoleRouter | None = None  # the rule by which experts of an adapter are chosen
    device: str = "auto"  # "auto", "cpu", "cuda" or "cuda:1"
    replicas: int = 1  # engines on this host, among which its memory and threads are divided
    place: int = 0  # which of them this is
    on_device: int = 1  # of them, those on the same device
    databases: str = ""  # where they have databases in common: the folder of the sockets to those who write
    backend: BackendName = "auto"  # what computes: own kernels if there are any for the device, else torch
    gpu_memory: int | None = None  # bytes of the GPU, at most; None: what is free
    max_rows: int | None = None  # rows that run at once
    max_waiting: int = 4096  # rows that may wait for a slot; more are refused
    prefill_tokens: int | None = None  # prompt tokens a step
    speculate: int = 0  # tokens of a draft that a step verifies for a row, at most; 0: no drafts
    draft_model: str | None = None  # a file or folder of a smaller model that guesses for it; None: none does
    threads: int | None = None  # of a step on a CPU; None: one for a small model, else a thread for each core
    batch_invariant: bool = False  # a row's results depend, to the bit, on nothing but the row
    wkv: str | None = None  # "fp16" or "fp32": how the recurrent state is stored
    sampler: SamplerName = "own"  # what draws the rows of /v2 that have no seed
    state_db: str | None = None  # a file of sessions, or a URL; None or IN_MEMORY: they end with the engine
    state_model: str = ""  # in a database at a URL: the further model whose sessions these are
    # If state_db is a URL: where the folder for states is made, or the URL of a store in which servers share
    # them; None or a URL: the folder is made here
    image_store: str | None = None
    cluster_secret: str | None = field(default=None, repr=False)  # by which servers get states of each other
    cluster_address: str | None = None  # "host:port" at which the others reach this one
    db_patience: int = 30  # seconds that a database at a URL may be away before what needs it fails
    l1: int | None = None  # states of sessions in slots of the device
    l2: int | None = None  # states of sessions in host memory, besides those in L1
    l3_bytes: int | None = None  # size of the database with its images, which go first
    durable: bool = True  # a turn is committed before its last event, not behind it
    token_log: bool = True  # a session is stored as its tokens; False: as its state only
    replay_tokens: int = 8192  # a session has no more tokens than that behind its last stored state
    replay_on_new_model: bool = (
        False  # sessions of a model with the same vocabulary are read again by this one
    )
    capture_late: bool = False  # graphs are captured, and GEMMs timed, behind the first requests
    prefix_cache_mb: int = 512  # host memory for the states of prompt prefixes; 0: none are kept


def on_each(
    configs: tuple[EngineConfig, ...], devices: tuple[str, ...], folder: Path
) -> list[tuple[EngineConfig, ...]]:
    """The configurations of the models in each engine process.

    Several have their databases in common, in this folder if no file is named. Threads are divided.
    """
    if len(devices) == 1:
        return [tuple(replace(config, device=devices[0]) for config in configs)]
    return [
        tuple(
            replace(
                config,
                device=device,
                state_db=config.state_db if config.state_db != IN_MEMORY else str(folder / f"{number}.db"),
                databases=str(folder),
                replicas=len(devices),
                place=place,
                on_device=devices.count(device),
                threads=config.threads and max(1, config.threads // len(devices)),
            )
            for number, config in enumerate(configs)
        )
        for place, device in enumerate(devices)
    ]


def is_url(database: str | None) -> bool:
    """Whether a database is one that other servers may share, by a URL of PostgreSQL."""
    return database is not None and database.startswith(URLS)


def has_password(database: str) -> bool:
    """Whether it is a URL with one."""
    user, at, _ = database.partition("://")[2].partition("/")[0].rpartition("@")
    return is_url(database) and ((bool(at) and ":" in user) or "password=" in database.partition("?")[2])


def writer_address(folder: str | Path, database: str) -> str:
    """Where the process listens that writes to the database for all engines."""
    name = blake2b(str(Path(database).resolve()).encode(), digest_size=8).hexdigest()
    return f"ipc://{folder}/{name}"


def further_model(default: EngineConfig, path: str, name: str | None) -> EngineConfig:
    """The configuration of a model beside the default one, whose sessions are in a file beside the default's.

    The file has the model's name: sessions.db, sessions.7b.db. In a database at a URL they are apart by it.
    It has no draft model.
    """
    database, called = default.state_db, name or file_name(path)
    further = replace(default, model_path=path, model_name=name, draft_model=None)
    if is_url(database):
        return replace(further, state_model=called)
    if database and database != IN_MEMORY:
        file = Path(database)
        database = str(file.with_name(f"{file.stem}.{called}{file.suffix}"))
    return replace(further, state_db=database)


def without_adapter(config: EngineConfig) -> EngineConfig:
    """A configuration without an adapter that is merged, and without its settings."""
    return replace(
        config, adapter=None, adapter_alpha=None, adapter_scaling=None, adapter_init=None, mole_router=None
    )


def file_name(path: str) -> str:
    """What a model of that file or folder is called, unless somebody names it."""
    return re.sub(r"\.(pth|safetensors|st)$", "", Path(path).name)


@dataclass(frozen=True, kw_only=True)
class FrontendConfig(ProcessConfig):
    """The front ends, which are all alike."""

    host: str = "127.0.0.1"  # an IP address of this machine
    port: int = 8000
    password: str | None = None  # None: everything is open
    admin_password: str | None = None  # for routes that load files; None: these are open to this machine
    cluster_secret: str | None = field(default=None, repr=False)  # for /cluster/state; None: it answers 404
    metrics_password: str | None = None  # for /metrics and /stats; None: they take `password`
    keys: str | None = None  # the file of keys, which are taken beside the password; None: there are none
    keys_copy: str = ""  # where the server keeps what it has read of that file last
    homes: str = ""  # where front ends note which of several engines has a session
    uploads: str | None = None  # where files are that an engine is to read; None: with other temporary files
    audit_log: str | None = None  # the file in which requests are noted, chained by hashes; None: in none
    traces: str | None = None  # where spans are sent, by OTLP over HTTP; None: there are none
    metric_names: MetricNames = "rwkv"  # of /metrics, unless it is asked for others
    models: str | None = None  # the folder of files that routes may load; None: they load none
    page: bool = True  # whether browsers get a page at /
    protect_translate: bool = False  # whether the password guards translation too
    glossary: str = ""  # lines of terms, as rwkv_batch/translation/glossary.py reads them
    max_body: int = 16 << 20  # bytes; a longer body is answered 413
    max_state: int = 256 << 20  # bytes; a longer file of a session is answered 413
    chat_template: ChatTemplateName = "auto"  # how chats are rendered; auto: by the checkpoint's name
    keep_blank_lines: bool = False  # inside messages of chats; False: they stay in code only
    sampling_profile: SamplingProfileName = "default"  # what chats are drawn with unless they say otherwise
    token_log: bool = True  # False: no response is stored, as that is its text
    plain_seconds: float = 0.25  # a reply that takes longer is a stream, which notices a client that leaves
    batch_dir: str | None = None  # the folder of files and batches; None: there are none
    batch_bytes: int = 10 << 30  # of all files of requests in it
    batch_days: int = 30  # until a file or batch is removed
    max_streams: int = 1024  # generation requests answered at once; more are answered 503
    # Of a connection, in seconds; 0: without end.
    header_timeout: float = 60.0  # for the head of a request, from its first byte on
    body_timeout: float = 60.0  # between two bytes of a body
    keep_alive_timeout: float = 900.0  # until the next request
    send_timeout: float = 60.0  # in which a client reads nothing of its reply
    max_connections: int = 16384  # of a front end


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ProcessConfig):
    """The supervisor, and the processes that it starts."""

    engines: tuple[EngineConfig, ...] = (EngineConfig(),)  # one for each model, the default one first
    devices: tuple[str, ...] = ("auto",)  # one engine process on each, with all models
    hung_seconds: int = 30  # until an engine that makes no step is started again; 0: never
    frontend: FrontendConfig = FrontendConfig()
    frontends: int | None = None  # how many; None: by the machine's cores
    drain_seconds: int = 25  # how long running requests may go on after a signal
