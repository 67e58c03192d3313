"""Two GPUs and more: sum, residual and norm in one kernel, over inboxes that the ranks write.

The ranks are processes of their own, as in an engine. What is checked is what a race would break:
many calls, of all sizes, eager and replayed, with one rank late now and then.
"""

import multiprocessing
import random
import time
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from nanovllm.kernels.all_reduce_norm import (
    EMPTY,
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_torch,
)
from nanovllm.layers.peer_norm import PeerNorm, sum_add_rms_norm, with_peer_norm
from nanovllm.utils.distributed import Communicator, join_group, leave_group, with_peer_memory
from nanovllm.utils.shared_file import SharedFile

pytestmark = [pytest.mark.gpu2, pytest.mark.usefixtures("hard_timeout")]

LIMIT_S = 100
EPS = 1e-6
MAX_ROWS = 300
GRAPH_SIZES = (1, 5, 64, 160, 300)
NUM_STEPS = 300
NUM_CALLS = 4  # in a step: two layers
# Half a unit of the last place of bfloat16 and float16, and float32's sums in another order.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}

Work = Callable[[Communicator], None]


def run_rank(rank: int, size: int, meeting_point: SharedFile, work: Work, failures: object) -> None:
    try:
        work(join_group(rank, size, "cuda", meeting_point.path))
        torch.cuda.synchronize()
        leave_group()
    except BaseException:
        failures.put(f"rank {rank}: {traceback.format_exc()}")  # type: ignore[attr-defined]
        raise


def run_on_gpus(size: int, work: Work) -> None:
    """Run `work` in so many ranks; raise what any raised."""
    context = multiprocessing.get_context("spawn")
    meeting_point, failures = SharedFile(0), context.SimpleQueue()
    ranks = [
        context.Process(
            target=run_rank, args=(rank, size, meeting_point, work, failures), daemon=True
        )
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    while any(process.is_alive() for process in ranks) and failures.empty():
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    is_done = not any(process.is_alive() for process in ranks)
    for process in ranks:
        process.kill()
        process.join()
    assert failures.empty(), failures.get()
    assert is_done, f"the ranks took longer than {LIMIT_S} s"
    assert [process.exitcode for process in ranks] == [0] * size
    meeting_point.close()


class Steps:
    """Buffers of a step of `NUM_CALLS` sums, and the step itself, eager or captured."""

    def __init__(self, tp: Communicator, hidden: int, dtype: torch.dtype) -> None:
        assert isinstance(tp.peer_norm, PeerNorm)
        assert tp.group is not None
        self.group = tp.group
        self.size = tp.size
        self.dtype = dtype
        self.inbox = tp.peer_norm._inbox  # whatever was measured to be faster
        shape = (NUM_CALLS, MAX_ROWS, hidden)
        self.x = torch.zeros(shape, dtype=dtype, device="cuda")
        self.residual = torch.zeros(shape[1:], dtype=dtype, device="cuda")
        self.weight = torch.ones(hidden, dtype=dtype, device="cuda")
        self.out = torch.zeros(shape, dtype=dtype, device="cuda")
        self.own = torch.Generator(device="cuda").manual_seed(tp.rank)
        self.shared = torch.Generator(device="cuda").manual_seed(7)
        self.graphs = {num_rows: self._capture(num_rows) for num_rows in GRAPH_SIZES}

    def draw(self) -> None:
        self.x.normal_(generator=self.own)
        self.residual.normal_(generator=self.shared)
        self.weight.normal_(generator=self.shared)

    def run(self, num_rows: int) -> None:
        for call in range(NUM_CALLS):
            x, residual = self.x[call, :num_rows], self.residual[:num_rows]
            out, _ = all_reduce_add_rms_norm(self.inbox, call % 2, x, residual, self.weight, EPS)
            self.out[call, :num_rows] = out

    def expected(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (calls, rows, hidden) and the residual after a step from these buffers."""
        parts = self._gather(self.x)[:, :, :num_rows]
        residual = self.residual[:num_rows].clone()
        outs = [
            all_reduce_add_rms_norm_torch(parts[:, call], residual, self.weight, EPS)[0]
            for call in range(NUM_CALLS)
        ]
        return torch.stack(outs), residual

    def check(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
        )
        bits = found.contiguous().view(torch.uint8)  # NCCL gathers no int16
        for others in self._gather(bits):
            assert torch.equal(bits, others), f"{what}: the ranks have different bits"

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor, group=self.group)
        return torch.stack(gathered)

    def _capture(self, num_rows: int) -> torch.cuda.CUDAGraph:
        self.run(num_rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(num_rows)
        return graph


def check_random_steps(tp: Communicator, hidden: int, dtype: torch.dtype) -> None:
    """Steps of the same random sizes on all ranks, of which some are late, by their own dice."""
    tp = with_peer_norm(tp, hidden, dtype, MAX_ROWS)
    steps = Steps(tp, hidden, dtype)
    dice, own_dice = random.Random(0), random.Random(tp.rank)
    for step in range(NUM_STEPS):
        graph_size = dice.choice([None, None, *GRAPH_SIZES])
        num_rows = graph_size or dice.randint(1, MAX_ROWS)
        # Several in a row without a look between, so that ranks can run ahead of each other.
        for _ in range(dice.randint(0, 3)):
            steps.run(dice.randint(1, MAX_ROWS))
            steps.graphs[dice.choice(GRAPH_SIZES)].replay()
        steps.draw()
        expected_out, expected_residual = steps.expected(num_rows)
        if own_dice.random() < 0.5:
            torch.cuda._sleep(own_dice.randint(1, 300_000))  # clock cycles, on the GPU
        if graph_size is None:
            steps.run(num_rows)
        else:
            steps.graphs[graph_size].replay()
        what = f"step {step}, {num_rows} rows of {hidden} {dtype}, graph {graph_size}"
        steps.check(steps.residual[:num_rows], expected_residual, what)
        steps.check(steps.out[:, :num_rows], expected_out, what)
    torch.cuda.synchronize()
    dist.barrier(tp.group)
    assert (steps.inbox.own == EMPTY).all(), "a row was left in the inbox"


def check_all_shapes(tp: Communicator) -> None:
    check_random_steps(tp, 4096, torch.bfloat16)
    check_random_steps(tp, 2560, torch.float16)
    check_random_steps(tp, 300, torch.float32)


def test_random_steps_equal_the_reference_with_the_same_bits_on_all_ranks(size: int) -> None:
    run_on_gpus(size, check_all_shapes)


def check_choice(tp: Communicator) -> None:
    tp = with_peer_memory(tp, 4096, torch.bfloat16, 256)
    fused = with_peer_norm(tp, 4096, torch.bfloat16, 256)
    assert isinstance(fused.peer_norm, PeerNorm)
    assert 0 < fused.peer_norm.max_rows <= 256, "one kernel is slower than two at every size"
    assert fused.all_reduce_name.startswith("fused with norms to ")
    for num_rows in (fused.peer_norm.max_rows, 1000):  # beyond the limit, too
        outs = []
        for ranks in (tp, fused):
            for turn in range(2):
                x, residual, weight = fused.peer_norm.draw_rows(num_rows)
                outs.append(sum_add_rms_norm(ranks, x, residual, weight, EPS, turn)[0])
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0], rtol=2e-2, atol=2e-2)
        if num_rows == 1000:
            assert torch.equal(outs[0], outs[2]), "a large batch is summed as it was"


def test_one_kernel_is_chosen_for_decode_and_large_batches_stay_as_they_were(size: int) -> None:
    run_on_gpus(size, check_choice)


def check_wrong_sums(tp: Communicator) -> None:
    def wrong(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, residual = all_reduce_add_rms_norm(*args)  # type: ignore[arg-type]
        return (out + 1 if tp.rank == 1 else out), residual

    from nanovllm.layers import peer_norm

    peer_norm.all_reduce_add_rms_norm = wrong  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="gives wrong sums: not used"):
        ranks = with_peer_norm(tp, 256, torch.bfloat16, 16)
    assert ranks.all_reduce_name == "nccl"
    x = torch.ones(2, 256, dtype=torch.bfloat16, device="cuda")
    _, residual = sum_add_rms_norm(ranks, x, torch.zeros_like(x), x[0], EPS, 0)
    assert (residual == tp.size).all()


def test_kernel_that_one_rank_finds_wrong_is_used_by_none(size: int) -> None:
    run_on_gpus(size, check_wrong_sums)
