"""Steps that are queued on a GPU: nothing here waits for it but `wait`."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.engine.runner import Draws, Steps
from rwkv_batch.model.rwkv7 import RWKV7, States
from rwkv_batch.ops.cuda.feed import STOPS
from rwkv_batch.ops.cuda.staging import Download, upload
from rwkv_batch.sampling.logprobs import RowLogprobs, logprobs, row_logprobs
from rwkv_batch.sampling.sampler_cuda import CudaSampler
from rwkv_batch.wire.protocol import Sampling


class Queued:
    """Draws on their way to the host."""

    def __init__(self, ids: Tensor, found: tuple[Tensor, ...] = (), tops: Collection[int] = ()) -> None:
        """`found`: logprobs, as from logprobs.logprobs, of rows that want `tops` of them."""
        self._ids, self._found, self._tops = Download(ids), [Download(tensor) for tensor in found], tops

    def wait(self) -> list[int]:
        return self._ids.wait().tolist()

    def logprobs(self) -> list[RowLogprobs]:
        if not self._found:
            return []
        values, ids = (download.wait() for download in self._found)
        return row_logprobs(values, ids, self._tops)


class CudaSteps(Steps):
    """For models whose kernels are there. All calls belong on one stream."""

    stops_ahead = STOPS
    sampler: CudaSampler

    def __init__(self, model: RWKV7, states: States) -> None:
        super().__init__(model, states)
        assert model.cuda is not None
        self._cuda, self._vocab = model.cuda, model.checkpoint.vocab

    @torch.inference_mode()
    def begin(self, slot: int, params: Sampling, seed: int, stream: int, stop_ids: Collection[int]) -> None:
        super().begin(slot, params, seed, stream, stop_ids)
        possible = [stop for stop in stop_ids if 0 <= stop < self._vocab]
        self._cuda.feed(self.states).begin(
            slot, possible if len(possible) <= STOPS else ()
        )  # a row that has more is never fed LAST

    @torch.inference_mode()
    def run(
        self,
        tokens: list[int],
        counts: Sequence[int],
        slots: Sequence[int],
        draws: Sequence[int],
        tops: Mapping[int, int],
    ) -> Draws:
        with torch.cuda.device(self.model.device):
            self._cuda.feed(self.states).prepare()
            logits, fed = self._logits(tokens, counts, slots, draws)
            if not draws:
                return Queued(
                    fed[:0]
                )  # to be waited for like any other, or a long prompt would be queued whole at once
            self.sampler.prepare([slots[row] for row in draws])
            ids = self.sampler.sample_async(logits, fed)
            self._cuda.feed(self.states).take(ids, fed)
            if not tops:
                return Queued(ids)
            wanted = upload(list(tops), self.model.device)
            return Queued(ids, logprobs(logits[wanted], ids[wanted], max(tops.values())), tops.values())

    def _logits(
        self, tokens: list[int], counts: Sequence[int], slots: Sequence[int], draws: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Of the rows that draw: logits `[draws, vocab]` fp16 and slots `[draws]` int32, negative for rows
        that had ended.
        """
        if max(counts) > 1:
            ids = torch.from_numpy(np.array(tokens, np.int32))  # several times faster than torch.tensor
            logits, fed = self._cuda.prefill(ids, counts, slots, self.states, draws)
        else:
            logits, fed = self.model.graphs(self.states).run(tokens, slots)
            if len(draws) < len(slots):
                index = upload(draws, self.model.device)
                logits, fed = logits[index], fed[index]
        return logits[:, : self._vocab], fed

    def _sampler(self) -> CudaSampler:
        return CudaSampler(len(self.states.wkv), self.model.checkpoint.vocab, self.model.device)
