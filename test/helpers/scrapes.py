"""What /metrics of a running server says, by name and labels."""

from collections.abc import Callable
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from serving import until


@dataclass
class Scrape:
    """One answer of /metrics."""

    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def of(cls, url: str, **params: str) -> "Scrape":
        # a connection of its own, so that any front end may answer
        answer = httpx.get(f"{url}/metrics", params=params, timeout=30)
        assert answer.status_code == 200, answer.text
        families = text_string_to_metric_families(answer.text)
        samples = [sample for family in families for sample in family.samples]
        return cls({(s.name, frozenset(s.labels.items())): s.value for s in samples})

    @classmethod
    def when(cls, url: str, condition: Callable[["Scrape"], bool]) -> "Scrape":
        """The first one for which the condition holds."""
        found: list[Scrape] = []
        until(lambda: condition(found.append(cls.of(url)) or found[-1]))
        return found[-1]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        wanted = labels.items()
        return sum(v for (n, of), v in self.samples.items() if n == f"rwkv:{name}" and wanted <= set(of))

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """A metric by the values of one of its labels, without those that are 0."""
        values = [dict(of).get(label) for n, of in self.samples if n == f"rwkv:{name}"]
        found = {value: self(name, **labels, **{label: value}) for value in values if value is not None}
        return {value: number for value, number in found.items() if number}

    def buckets(self, name: str) -> dict[float, float]:
        """Of a histogram: how many values each bucket has alone, by its upper bound."""
        below, alone = 0.0, {}
        for bound, count in sorted((float(le), n) for le, n in self.all_of(f"{name}_bucket").items()):
            alone[bound], below = count - below, count
        return alone

    def all_of(self, name: str) -> dict[str, float]:
        """A histogram's samples by their `le`, summed over its other labels."""
        bounds = {dict(of)["le"] for n, of in self.samples if n == f"rwkv:{name}"}
        return {le: self(name, le=le) for le in bounds}
