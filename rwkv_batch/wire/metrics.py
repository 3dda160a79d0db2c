"""The metrics of the server: their names, what they mean, and how the engine's travel to a front end.

Names are vLLM's, with another prefix, where the meaning is the same. As there, what is called a request in
them is one row: a prompt that is continued once. No label holds anything that clients choose.
"""

from typing import Literal, NamedTuple

from msgspec import Struct

PREFIX = "rwkv:"
LABEL = "engine"  # the last one of every series of an engine, where there are several

# Upper bounds in seconds: of what a client waits for, and of what a step takes.
WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
STEPS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
POWERS = tuple(float(1 << n) for n in range(15))  # of rows and tokens

StepKind = Literal["decode", "prefill", "mixed"]
STEP_KINDS: tuple[StepKind, ...] = ("decode", "prefill", "mixed")


class MetricFamily(NamedTuple):
    """A metric. A counter's samples are called NAME_total."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()  # of a histogram's buckets, upper ones, without infinity


class Series(Struct, frozen=True, array_like=True):
    """What the engine has counted for one set of labels.

    values: one number; of a histogram how many fell into each bucket, the last of which has no bound, and
    then the sum of all.
    """

    family: str  # its name, without PREFIX
    labels: list[str]  # values of the family's labels, in their order
    values: list[float]


# What front ends and the supervisor count.
SERVER: dict[str, MetricFamily] = {
    "http_requests": MetricFamily(
        "counter", "HTTP requests by route, method and status.", ("handler", "method", "status")
    ),
    "key_requests": MetricFamily("counter", "Requests that the engine has got, by key (--keys).", ("key",)),
    "key_tokens": MetricFamily(
        "counter", "Tokens of the prompts and answers of these, by key (--keys).", ("key", "kind")
    ),
    "restarts": MetricFamily("counter", "Processes that died and were started again.", ("process",)),
    "engine_up": MetricFamily("gauge", "1 if the engine has answered, else 0; then its metrics are missing."),
}
MODEL, DEVICE = ("model_name",), ("device",)
# What the engine counts.
ENGINE: dict[str, MetricFamily] = {
    "models_loaded": MetricFamily("gauge", "Models that are served."),
    "device_busy_seconds": MetricFamily("counter", "Seconds in which the device has run steps.", DEVICE),
    "device_idle_ratio": MetricFamily(
        "gauge", "Share of the last seconds in which the device has run no step.", DEVICE
    ),
    "device_free_bytes": MetricFamily("gauge", "Memory of the device that is free.", DEVICE),
    "device_total_bytes": MetricFamily("gauge", "Memory of the device.", DEVICE),
    "device_memory_bytes": MetricFamily(
        "gauge",
        "Memory of the device by purpose: weights, states of rows, idle sessions, and steps at most.",
        ("model_name", "purpose"),
    ),
    "background_work_pending": MetricFamily(
        "gauge",
        "1 while graphs are captured or GEMMs timed behind the service, else 0.",
        MODEL,
    ),
    "num_requests_running": MetricFamily("gauge", "Rows that have a slot.", MODEL),
    "num_requests_waiting": MetricFamily("gauge", "Rows that wait for a slot or for their session.", MODEL),
    "requests": MetricFamily(
        "counter", "Requests for texts that the engine has got, by outcome.", ("model_name", "outcome")
    ),
    "request_rows": MetricFamily("counter", "Rows of the requests that were accepted.", MODEL),
    "request_success": MetricFamily(
        "counter", "Rows that have ended, by what ended them.", ("model_name", "finished_reason")
    ),
    "num_preemptions": MetricFamily(
        "counter", "Rows of batches that gave their slots to others, and went on later.", MODEL
    ),
    "corrupted_requests": MetricFamily(
        "counter", "Rows whose logits were not finite numbers, which ended them with an error.", MODEL
    ),
    "prompt_tokens": MetricFamily("counter", "Tokens of the prompts of accepted requests.", MODEL),
    "prompt_tokens_cached": MetricFamily("counter", "Of these, tokens that were not computed again.", MODEL),
    "prefill_tokens": MetricFamily("counter", "Tokens that were read, of prompts and of sessions.", MODEL),
    "generation_tokens": MetricFamily("counter", "Tokens that were generated, without stop ids.", MODEL),
    "spec_decode_num_draft_tokens": MetricFamily(
        "counter", "Tokens of drafts that were verified (--speculate).", MODEL
    ),
    "spec_decode_num_accepted_tokens": MetricFamily("counter", "Of these, tokens that were accepted.", MODEL),
    "prefix_cache_queries": MetricFamily("counter", "Tokens that the prefix cache was asked for.", MODEL),
    "prefix_cache_hits": MetricFamily("counter", "Tokens that the prefix cache had.", MODEL),
    "time_to_first_token_seconds": MetricFamily(
        "histogram", "From a row's arrival to its first token.", MODEL, WAITS
    ),
    "inter_token_latency_seconds": MetricFamily("histogram", "Between two tokens of a row.", MODEL, STEPS),
    "e2e_request_latency_seconds": MetricFamily(
        "histogram", "From a row's arrival to its end, of rows that ended by themselves.", MODEL, WAITS
    ),
    "request_queue_time_seconds": MetricFamily(
        "histogram", "From a row's arrival to its slot.", MODEL, WAITS
    ),
    "step_time_seconds": MetricFamily(
        "histogram", "Time that a step takes of the device, by kind.", ("model_name", "kind"), STEPS
    ),
    "batch_size": MetricFamily("histogram", "Rows of a step.", MODEL, POWERS),
    "iteration_tokens_total": MetricFamily("histogram", "Tokens that a step feeds.", MODEL, POWERS),
    "sessions": MetricFamily(
        "gauge", "Sessions by the fastest tier that has their state.", ("model_name", "tier")
    ),
    "session_commits": MetricFamily("counter", "Turns of sessions that were committed.", MODEL),
    "commit_transactions": MetricFamily("counter", "Transactions of the database.", MODEL),
    "state_copies": MetricFamily(
        "counter", "States that were copied, by direction.", ("model_name", "direction")
    ),
    "adapters_loaded": MetricFamily("gauge", "Adapters that requests may name.", MODEL),
}
FAMILIES = SERVER | ENGINE
# What only boards and autoscalers made for vLLM ask for, as a label names adapters.
OF_VLLM: dict[str, MetricFamily] = {
    "lora_requests_info": MetricFamily(
        "gauge",
        "When this was asked, with the adapters of rows that run and wait.",
        ("model_name", "running_lora_adapters", "waiting_lora_adapters", "max_lora"),
    ),
}
KNOWN = FAMILIES | OF_VLLM
