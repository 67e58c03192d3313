"""Sum, residual and norm over inboxes that are ordinary tensors: one rank at a time, the others'
rows already there; then two processes that hand rows to one another.
"""

import mmap
import multiprocessing
import random
import time

import pytest
import torch
from compiling import (
    CAPABILITIES,
    DEVICE,
    IS_INTERPRETED,
    compile_for,
    needs_compiler,
    needs_launch,
)

from nanovllm.kernels.all_reduce_norm import (
    EMPTY,
    Inbox,
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_kernel,
    all_reduce_add_rms_norm_torch,
    inbox_dtype,
    inbox_shape,
)
from nanovllm.kernels.norm import add_rms_norm_torch

EPS = 1e-6
MAX_ROWS = 5
# One rounding of the result: the unit of the last place, relative, plus float32 noise of the sums.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def empty_inboxes(size: int, hidden: int, dtype: torch.dtype) -> list[Inbox]:
    """Those of all ranks, in this process."""
    shape = inbox_shape(size, MAX_ROWS, hidden)
    own = [torch.full(shape, EMPTY, dtype=inbox_dtype(dtype), device=DEVICE) for _ in range(size)]
    addresses = torch.tensor(
        [[tensor[turn].data_ptr() for tensor in own] for turn in range(2)], device=DEVICE
    )
    return [Inbox(tensor, addresses, rank) for rank, tensor in enumerate(own)]


def bits_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(inbox_dtype(rows.dtype))


def push_others(inbox: Inbox, turn: int, parts: torch.Tensor) -> None:
    """What the other ranks would push."""
    for rank, part in enumerate(parts):
        if rank != inbox.rank:
            inbox.own[turn, rank, : len(part)] = bits_of(part)


def test_reference_is_a_sum_and_then_add_rms_norm() -> None:
    parts, residual = draw(3, 4, 16, dtype=torch.float32, seed=0), torch.randn(4, 16)
    weight = torch.randn(16)
    expected, expected_residual = add_rms_norm_torch(
        parts.cpu().sum(0), residual.clone(), weight, EPS
    )
    out, same = all_reduce_add_rms_norm_torch(parts.cpu(), residual, weight, EPS)
    assert same is residual
    torch.testing.assert_close(residual, expected_residual)
    torch.testing.assert_close(out, expected)


@needs_launch
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("size", "hidden"), [(2, 256), (2, 96), (3, 300), (8, 512)])
def test_every_rank_computes_the_reference_with_the_same_bits(
    size: int, hidden: int, dtype: torch.dtype
) -> None:
    """Turn after turn, with other numbers of rows; what was pushed is what the others wait for."""
    inboxes = empty_inboxes(size, hidden, dtype)
    weight = draw(hidden, dtype=dtype, seed=1)
    for call, num_rows in enumerate((3, MAX_ROWS, 1, 4)):
        turn = call % 2
        parts = draw(size, num_rows, hidden, dtype=dtype, seed=2 + call)
        residual = draw(num_rows, hidden, dtype=dtype, seed=9 + call)
        expected = all_reduce_add_rms_norm_torch(parts, residual.clone(), weight, EPS)
        outs = []
        for inbox in inboxes:
            for peer in inboxes:
                peer.own.fill_(EMPTY)
            push_others(inbox, turn, parts)
            out, total = all_reduce_add_rms_norm(
                inbox, turn, parts[inbox.rank], residual.clone(), weight, EPS
            )
            outs.append((out, total))
            assert (inbox.own[turn] == EMPTY).all(), "rows stay after they were read"
            for peer in inboxes:
                if peer is not inbox:
                    pushed = peer.own[turn, inbox.rank]
                    assert torch.equal(pushed[:num_rows], bits_of(parts[inbox.rank]))
                    assert (pushed[num_rows:] == EMPTY).all()
        for found in outs:
            for actual, wanted, of_rank_0 in zip(found, expected, outs[0], strict=True):
                tolerance = TOLERANCE[dtype]
                torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)
                assert torch.equal(bits_of(actual), bits_of(of_rank_0))


@needs_launch
def test_strided_rows_are_read_and_updated_in_place() -> None:
    inbox = empty_inboxes(2, 256, torch.float32)[1]
    parts = draw(2, 3, 256, dtype=torch.float32, seed=0)
    wide = draw(3, 300, dtype=torch.float32, seed=1)
    x, residual = draw(3, 300, dtype=torch.float32, seed=2)[:, :256], wide[:, :256]
    x.copy_(parts[1])
    margin, weight = wide[:, 256:].clone(), draw(256, dtype=torch.float32, seed=3)
    expected, expected_residual = all_reduce_add_rms_norm_torch(
        parts, residual.clone(), weight, EPS
    )
    push_others(inbox, 0, parts)
    out, same = all_reduce_add_rms_norm(inbox, 0, x, residual, weight, EPS)
    assert same is residual
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(residual, expected_residual)
    assert torch.equal(wide[:, 256:], margin)


@needs_launch
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nan_that_looks_like_no_data_is_pushed_as_another(dtype: torch.dtype) -> None:
    """Else the peers would wait for it for ever."""
    inboxes = empty_inboxes(2, 256, dtype)
    parts = torch.zeros(2, 1, 256, dtype=dtype, device=DEVICE)
    bits_of(parts)[0, 0, 7] = EMPTY
    push_others(inboxes[0], 0, parts)
    weight = torch.ones(256, dtype=dtype, device=DEVICE)
    out, residual = all_reduce_add_rms_norm(
        inboxes[0], 0, parts[0], torch.zeros_like(parts[0]), weight, EPS
    )
    assert out.isnan().all()
    assert residual.isnan().nonzero().tolist() == [[0, 7]]
    pushed = inboxes[1].own[0, 0, :1]
    assert (pushed != EMPTY).all()
    assert pushed.view(dtype).isnan().nonzero().tolist() == [[0, 7]]


def run_many_calls(rank: int, memory: list[mmap.mmap]) -> None:
    """One of two ranks that make the same random calls, each late now and then."""
    shape, hidden = inbox_shape(2, MAX_ROWS, 64), 64
    own = [torch.frombuffer(each, dtype=torch.int32)[: 4 * MAX_ROWS * 64] for each in memory]
    own = [each.view(shape) for each in own]
    addresses = [[each[turn].data_ptr() for each in own] for turn in range(2)]
    inbox = Inbox(own[rank], torch.tensor(addresses), rank)
    dice, own_dice = random.Random(0), random.Random(rank)
    weight = torch.ones(hidden)
    for call in range(100):
        num_rows = dice.randint(1, MAX_ROWS)
        parts = torch.randn(2, num_rows, hidden, generator=torch.Generator().manual_seed(call))
        residual = parts[0].clone()
        expected = all_reduce_add_rms_norm_torch(parts, residual.clone(), weight, EPS)
        if own_dice.random() < 0.2:
            time.sleep(0.01 * own_dice.random())
        found = all_reduce_add_rms_norm(inbox, call % 2, parts[rank], residual, weight, EPS)
        torch.testing.assert_close(found, expected)


@pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1: kernels of two processes")
def test_two_processes_hand_rows_to_one_another() -> None:
    """Whoever is late; the inboxes are empty in the end."""
    memory = [mmap.mmap(-1, 4 * 4 * MAX_ROWS * 64) for _ in range(2)]
    for each in memory:
        each[:] = b"\xff" * len(each)  # EMPTY
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=run_many_calls, args=(rank, memory), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    assert all(each[:] == b"\xff" * len(each) for each in memory), "a row was left in an inbox"


def test_what_does_not_fit_raises_naming_both() -> None:
    inbox = empty_inboxes(2, 16, torch.float16)[0]
    x, weight = draw(2, 16, dtype=torch.float16, seed=0), draw(16, dtype=torch.float16, seed=1)

    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor = weight) -> None:
        all_reduce_add_rms_norm(inbox, 0, x, residual, weight, EPS)

    with pytest.raises(ValueError, match=r"\(2, 16\).*\(1, 16\)"):
        run(x, x[:1])
    with pytest.raises(ValueError, match=r"6 rows, the inbox holds 5"):
        run(x.repeat(3, 1), x.repeat(3, 1))
    with pytest.raises(ValueError, match=r"weight is \(8,\)"):
        run(x, x, weight[:8])
    with pytest.raises(ValueError, match=r"float32.*int16"):
        run(x.float(), x.float())
    with pytest.raises(ValueError, match="rows contiguous"):
        run(draw(16, 2, dtype=torch.float16, seed=0).t(), x)


@needs_compiler
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("dtype", "bits"), [("bf16", "i16"), ("fp16", "i16"), ("fp32", "i32")])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_kernel_compiles_for_gpus_that_are_not_there(
    size: int, dtype: str, bits: str, capability: int
) -> None:
    """And looks at an inbox with volatile loads: others might find the row in a cache for ever."""
    rows = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), f"*{dtype}")
    inbox = {"inbox_ptr": f"*{bits}", "addresses_ptr": "*i64", "rank": "i32"}
    strides = dict.fromkeys(("x_stride", "residual_stride", "rank_stride"), "i32")
    compiled = compile_for(
        capability,
        all_reduce_add_rms_norm_kernel,
        rows | inbox | strides | {"eps": "fp32"},
        {
            "SIZE": size,
            "HIDDEN": 2560,
            "BLOCK_SIZE": 1 << (size - 1).bit_length(),
            "BLOCK_HIDDEN": 4096,
            "EMPTY": EMPTY,
            "MAX_SPINS": 1 << 20,
        },
        num_warps=8,
    )
    assert "ld.volatile.global" in compiled.asm["ptx"]
