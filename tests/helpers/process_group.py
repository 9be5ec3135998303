"""Real process groups for tests: gloo, with one process per rank on this machine.

A job is a top-level function of a test file, `job(rank, size, *arguments)`. It runs concurrently on every
rank of a process group, and its result is pickled and returned. The processes are forked from a server that
imports torch once.
"""

import importlib.util
import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOADED = ["torch.distributed.fsdp", "torch.nn.parallel", "fp8scope_kernels"]
# What ranks that compile import: 3 s of processor time in each of them.
PRELOADED += ["torch._dynamo.testing", "torch._inductor.compile_fx", "torch.distributed.checkpoint"]
DEADLINE = 120.0
"""Seconds until a job counts as hung."""


def run_ranks(job: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Run `job` on `size` ranks and return its results. Raises RuntimeError with the traceback of a rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    code = job.__code__
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            call = (theirs, code.co_filename, code.co_name, rank, size, directory, arguments)
            process = context.Process(target=_serve, args=call, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            # Read all replies: the rank that failed may come after one that only waited for it.
            replies = [_reply(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    for failed, result in replies:
        if failed:
            raise RuntimeError(result)
    return [result for _, result in replies]


def _reply(pipe: Connection) -> tuple[bool, Any]:
    if not pipe.poll(DEADLINE):
        return True, f"A rank did not reply within {DEADLINE:.0f} seconds."
    try:
        reply: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())
        return reply
    except EOFError:
        return True, "The process of a rank exited without a reply."


def _serve(
    pipe: Connection, path: str, name: str, rank: int, size: int, directory: str, arguments: tuple[Any, ...]
) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    try:
        distributed.init_process_group(
            "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size
        )
        # Import by path: another process cannot import a test file by name.
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        result = getattr(module, name)(rank, size, *arguments)
        distributed.barrier()
        # Not `send`: torch would pass tensors as memory shared with this process, which is about to exit.
        pipe.send_bytes(pickle.dumps((False, result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((True, f"rank {rank}:\n{traceback.format_exc()}")))
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
