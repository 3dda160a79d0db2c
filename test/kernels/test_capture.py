"""Capturing CUDA graphs."""

import gc

import torch
from cuda_gpu import needs_gpu

from rwkv_batch.model.cuda.steps.capture import capture

pytestmark = needs_gpu


def test_graphs_that_become_garbage_do_not_break_a_capture():
    x = torch.zeros(8, device="cuda")
    cycle: list = [capture(lambda: x.add_(1))]
    cycle.append(cycle)
    del cycle
    gc.collect(1)  # old enough that only a full collection would find it
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)  # every new list is a reason for one
    try:
        graph = capture(lambda: [x.add_(len([i])) for i in range(50)])
    finally:
        gc.set_threshold(*before)
    x.zero_()
    graph.replay()
    assert x.tolist() == [50] * 8
