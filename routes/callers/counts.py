"""What keys have used, for /metrics, in the files in which all front ends count (routes/http/counts.py)."""

from prometheus_client import Counter

from rwkv_batch.wire.metrics import PREFIX, SERVER


class KeyCounts:
    """What keys have used, by their names, of which there are as many as in the file of keys."""

    def __init__(self) -> None:
        self._requests, self._tokens = (
            Counter(PREFIX + name, SERVER[name].help, SERVER[name].labels, registry=None)
            for name in ("key_requests", "key_tokens")
        )

    def add(self, key: str, requests: int, prompt: int, completion: int) -> None:
        """Count requests of a key, and tokens of their prompts and answers."""
        self._requests.labels(key).inc(requests)
        self._tokens.labels(key, "prompt").inc(prompt)
        self._tokens.labels(key, "completion").inc(completion)
