"""A GPU on which a kernel never ends: what an engine asks of it, and how its server goes on."""

import multiprocessing
from multiprocessing.connection import Connection

import torch
from cuda_gpu import needs_gpu

from bench import recovery
from rwkv_batch.ops.device import touch

pytestmark = needs_gpu
FOR_YEARS = 1 << 60  # cycles
spawn = multiprocessing.get_context("spawn")


def spin(said: Connection) -> None:
    device = torch.device("cuda:0")
    touch(device)
    said.send("works")
    torch.cuda._sleep(FOR_YEARS)
    said.send("hangs")
    touch(device)
    said.send("works again")


def test_a_kernel_that_never_ends_is_seen():
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=spin, args=(theirs,))
    process.start()
    try:
        assert [ours.recv(), ours.recv()] == ["works", "hangs"]
        assert not ours.poll(2), "it could not have come"
    finally:
        process.kill()
        process.join()


def test_a_server_on_such_a_gpu_is_not_ready_and_has_another_engine_soon(capfd):
    """Shorter than by default. How soon without that, bench/recovery.py --hung says."""
    assert recovery.main(["--hung", "--rounds", "1", "--", "--device", "cuda", "--hung-seconds", "12"]) == 0
    assert "a kernel that never ends: /health/ready is 503 after" in capfd.readouterr().out
