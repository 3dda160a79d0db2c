"""How urgent a request is: its class, and within that its deadline.

A request of the class "batch" runs in slots that interactive ones leave, and gives its slot back when one of
these waits. It is one with OpenAI's `service_tier` "flex", or whose `priority` is "batch" or, as vLLM has it,
a number above 0 (the smaller is the earlier there). All others are interactive.
"""

import time
from typing import Annotated, Literal

from msgspec.structs import replace
from pydantic import BaseModel, Field

from routes.http.schemas import INT_LIMIT, Int, Number
from rwkv_batch.wire.protocol import GenerateRequest

MOST_SECONDS = 30 * 86400

ServiceTier = Literal["auto", "default", "flex", "priority", "scale", "standard_only"]
Priority = Literal["interactive", "batch"] | Annotated[Int, Field(ge=-INT_LIMIT, le=INT_LIMIT)]


class PriorityFields(BaseModel):
    """What bodies of requests for texts have in common."""

    service_tier: ServiceTier | None = None
    priority: Priority | None = None
    # Seconds from now within which the answer is wanted: rows with the earliest go first in their class.
    deadline: Annotated[Number, Field(gt=0, le=MOST_SECONDS)] | None = None

    @property
    def is_batch(self) -> bool:
        """Whether it waits for interactive requests."""
        late = self.priority == "batch" or (isinstance(self.priority, int) and self.priority > 0)
        return late or self.service_tier == "flex"

    def ranked(self, request: GenerateRequest) -> GenerateRequest:
        """The request, as urgent as these fields say."""
        if not self.is_batch and self.deadline is None:
            return request
        deadline = time.time() + self.deadline if self.deadline else 0.0
        if (
            self.is_batch
        ):  # rows of one batch have the same, and so run in order, though each says what is left
            deadline = float(round(deadline))
        return replace(request, batch=self.is_batch, deadline=deadline)
