"""How many servers there should be: by the rows that wait or run, and the slots that there are for them.

`said` is what a replica says of its server, `by_rows` Ray Serve's policy over all of them.
"""

import json
import math
from typing import Any

TARGET = 0.7  # of the slots for rows


def said(stats: bytes) -> dict[str, float]:
    """`busy` of what a server has answered to /stats; nothing where that is no such answer.

    A number that is none would end the policy, which has those of all servers.
    """
    try:
        share = busy(json.loads(stats))
    except (ValueError, TypeError, LookupError, ArithmeticError):
        return {}
    return {"busy": share} if 0 <= share < math.inf else {}


def busy(stats: dict[str, Any]) -> float:
    """How many rows wait or run for each that may run at once, of the model with the most.

    stats: what /stats answers.
    """
    return max(((each["running"] + each["waiting"]) / each["rows"] for each in stats["models"]), default=0.0)


def by_rows(context: Any) -> tuple[int, dict[str, Any]]:
    """The number of servers that makes TARGET of their slots busy. context: Serve's AutoscalingContext.

    A server that says nothing counts as one that is needed, and no others with it.
    """
    shares = (context.aggregated_metrics or {}).get("busy", {})
    if not shares:
        return context.target_num_replicas, {}
    silent = max(0, context.current_num_replicas - len(shares))
    wanted = math.ceil(sum(shares.values()) / TARGET - 1e-9) + silent
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(low, min(high, wanted)), {}
