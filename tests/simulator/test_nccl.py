"""What the simulator claims of several devices: NCCL's values and order, and missing ranks."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from tests.simulator.programs import ranks

COLLECTIVES = """
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
R, dev = dist.ReduceOp, torch.device("cuda", rank)

def off(tensor):
    return tensor.cpu().double()

def reductions(each, x, dtype):
    rows = torch.stack(each).double()
    wanted = {R.SUM: rows.sum(0), R.MIN: rows.amin(0), R.MAX: rows.amax(0)}
    if dtype is not torch.bool:
        wanted[R.PRODUCT] = rows.prod(0)
    if dtype.is_floating_point:
        wanted[R.AVG] = rows.mean(0)
    for op, want in wanted.items():
        y = x.clone()
        dist.all_reduce(y, op)
        rtol = 1e-2 if op == R.AVG else 0
        assert torch.allclose(off(y), want.to(dtype).double(), rtol=rtol), (dtype, op)
    if dtype is not torch.bool:
        y = torch.empty_like(x)
        dist.reduce_scatter_single(y, torch.cat([x + r for r in range(n)]))
        assert torch.equal(off(y), rows.sum(0) + n * rank), dtype

def exchanges(each, x, size):
    y = x.new_empty(n * size)
    dist.all_gather_single(y, x)
    assert torch.equal(y.cpu(), torch.cat(each))
    for root in range(n):
        y = x.clone()
        dist.broadcast(y, root)
        assert torch.equal(y.cpu(), each[root])
    part = lambda a, b: (a + b) % 3 * size // 3
    y = [x.new_empty(part(rank, r)) for r in range(n)]
    dist.all_to_all(y, [x[: part(rank, r)].contiguous() for r in range(n)])
    assert all(torch.equal(t.cpu(), each[r][: part(rank, r)]) for r, t in enumerate(y))
    y = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, (rank + 1) % n)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, y, (rank - 1) % n)]):
        work.wait()
    assert torch.equal(y.cpu(), each[rank - 1])

floats = torch.float32, torch.float16, torch.bfloat16, torch.float64
for dtype in (*floats, torch.int32, torch.int64, torch.uint8, torch.bool):
    for size in (1, 7, 300_001):
        each = [((torch.arange(size) * (r + 1) + r) % 5).to(dtype) for r in range(n)]
        x = each[rank].to(dev)
        reductions(each, x, dtype)
        exchanges(each, x, size)
half = dist.new_group(list(range(n // 2, n)))  # by ncclCommSplit
if rank >= n // 2:
    y = torch.ones(3, device=dev)
    dist.all_reduce(y, group=half)
    assert float(y.sum()) == 3 * (n - n // 2)
graph, y = torch.cuda.CUDAGraph(), torch.ones(4, device=dev)
with torch.cuda.graph(graph):
    dist.all_reduce(y)
for _ in range(3):
    graph.replay()
assert float(y[0]) == n**3
dist.destroy_process_group()
print("fine", flush=True)
"""


@pytest.mark.parametrize("n", [2, 4])
def test_collectives(n: int, tmp_path: Path) -> None:
    [(code, said)] = ranks(n, COLLECTIVES, tmp_path)
    assert (code, said.count("fine")) == (0, n), said


BESIDE = """
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
x, y = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
y.add_(1)
dist.barrier()
torch.cuda.synchronize()
begun = time.monotonic()
work = dist.all_reduce(x, async_op=True)
y.add_(1)
torch.cuda.current_stream().synchronize()
assert not work.is_completed(), "another kernel had to wait for it"
work.wait()
assert float(x[0]) == n
assert time.monotonic() - begun >= 2.0, "no collective is quicker than CUDASIM_NCCL_US"
dist.destroy_process_group()
"""


def test_collectives_run_beside_the_other_streams(tmp_path: Path) -> None:
    [(code, said)] = ranks(2, BESIDE, tmp_path, CUDASIM_NCCL_US="2000000")
    assert code == 0, said


MISSING = """
dist.init_process_group("nccl", timeout=timedelta(seconds=3))
x = torch.ones(1000, device="cuda")
for _ in range(3):
    dist.all_reduce(x)
torch.cuda.synchronize()
if rank == 1:
    if os.environ["HOW"] == "killed":
        os.kill(os.getpid(), 9)
    time.sleep(6)
    os._exit(0)
dist.all_reduce(torch.ones(7, 11, device="cuda"))
torch.cuda.synchronize()
"""
TIMEOUT = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE"


@pytest.mark.parametrize(("how", "code"), [("asleep", 0), ("killed", -9)])
def test_a_missing_rank_times_out(how: str, code: int, tmp_path: Path) -> None:
    done = ranks(
        3,
        MISSING,
        tmp_path,
        launcher=False,
        HOW=how,
        CUDASIM_SHM=str(tmp_path / "shared"),
        TORCH_NCCL_ENABLE_TIMING="1",
        TORCH_FR_BUFFER_SIZE="100",
        TORCH_FR_DUMP_TEMP_FILE=str(tmp_path / "rank"),
        TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="500",
        TORCH_NCCL_DUMP_ON_TIMEOUT="1",
    )
    assert done[1][0] == code, done[1]
    for rank in (0, 2):
        assert done[rank][0] == -6, done[rank]
        assert f"{TIMEOUT}, NumelIn=77" in done[rank][1], done[rank]
    last = pickle.loads((tmp_path / "rank0").read_bytes())["entries"][-1]
    assert (last["profiling_name"], last["state"]) == ("nccl:all_reduce", "started")
    assert (last["collective_seq_id"], last["input_sizes"]) == (4, [[7, 11]])
    assert not [name for name in os.listdir(tmp_path) if ".nccl-" in name], "left by NCCL"
