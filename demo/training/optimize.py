"""AdamW over parameters whose gradients lie in one buffer, which several GPUs average."""

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch import distributed as dist


class Team:
    """The processes that train together, one for each GPU: those that torchrun has started, or this one alone."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.size = cuda, self.processes()
        self.first = self.my_rank() == 0
        self.interval = 16 if self.size > 1 else 1  # steps between two agreements
        self.device = "cpu"
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            self.device = "cuda"
        if self.size > 1:
            dist.init_process_group("nccl" if cuda else "gloo")

    @staticmethod
    def processes() -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    @staticmethod
    def my_rank() -> int:
        return int(os.environ.get("RANK", "0"))

    def capture(self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int] | None) -> torch.cuda.graph:
        """Records what follows. With several processes, a thread of NCCL may ask for its events meanwhile."""
        return torch.cuda.graph(
            graph, pool=pool, capture_error_mode="thread_local" if self.size > 1 else "global"
        )

    def agree(self, *numbers: float) -> list[float]:
        """What the first process says, because clocks differ."""
        if self.size == 1:
            return list(numbers)
        said = torch.tensor(numbers, device=self.device, dtype=torch.float64)
        dist.broadcast(said, 0)
        return said.tolist()

    def average(self, buffer: Tensor) -> None:
        if self.size > 1:
            dist.all_reduce(buffer)
            buffer /= self.size

    def leave(self) -> None:
        """Wait for the others, and part."""
        if self.size > 1:
            dist.barrier()
            dist.destroy_process_group()


class Optimizer:
    """AdamW, gradients clipped to length 1, on a GPU in one captured graph.

    `rate`: the learning rate. Gradients are added up in the parameters' `grad` until `step` uses them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], team: Team) -> None:
        self.named, self.team = dict(parameters), team
        trained = list(self.named.values())
        self.rate = torch.tensor(0.0, device=team.device)
        self.buffer = torch.zeros(sum(p.numel() for p in trained), device=team.device)
        for p, part in zip(trained, self.buffer.split([p.numel() for p in trained]), strict=True):
            p.grad = part.view_as(p)
        matrices = [p for p in trained if p.dim() == 2 and min(p.shape) > 8]
        others = [p for p in trained if not (p.dim() == 2 and min(p.shape) > 8)]
        groups = [
            {"params": part, "weight_decay": decay}
            for part, decay in ((matrices, 0.02), (others, 0.0))
            if part
        ]
        self.adam = torch.optim.AdamW(
            groups, lr=self.rate, betas=(0.9, 0.99), eps=1e-10, capturable=team.cuda, fused=team.cuda
        )
        self.pool = torch.cuda.graph_pool_handle() if team.cuda else None  # graphs never overlap
        self.graph: torch.cuda.CUDAGraph | None = None

    def restore(self, steps: int, moments: dict[str, Tensor]) -> None:
        """Go on with these second moments. The first moments are rebuilt within some ten steps."""
        for name, p in self.named.items():
            count = torch.tensor(float(steps), device=self.team.device)
            square = moments[name].to(self.team.device)
            self.adam.state[p] = {"step": count, "exp_avg": torch.zeros_like(p), "exp_avg_sq": square}

    def moments(self) -> dict[str, Tensor]:
        """The second moments by the names of the parameters."""
        return {name: self.adam.state[p]["exp_avg_sq"] for name, p in self.named.items()}

    def step(self) -> None:
        """Use the gradients, averaged over the team, and forget them."""
        self.team.average(self.buffer)
        if not self.team.cuda:
            return self._apply()
        if self.graph is None:
            self._apply()  # makes the moments, outside of the graph
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with self.team.capture(self.graph, self.pool):
                self._apply()
        else:
            self.graph.replay()
        return None

    def _apply(self) -> None:
        self.buffer.mul_((1 / (self.buffer.norm() + 1e-6)).clamp(max=1))
        self.adam.step()
        self.buffer.zero_()
