"""The layers of every rank together are the whole layer; each op equals its definition."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from nanovllm.kernels.norm import qk_norm_rope_store_torch
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backend import select_backend, torch_backend
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    num_kv_heads_of_rank,
)
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import Context, get_context, set_context
from nanovllm.utils.distributed import Communicator

SIZES = [1, 2, 4, 8]
HIDDEN, HEAD_DIM = 24, 6


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ranks(size: int) -> list[Communicator]:
    return [Communicator(rank, size) for rank in range(size)]


def load(layer: nn.Module, weight: torch.Tensor, shard_id: object = None) -> None:
    layer.weight.weight_loader(layer.weight, weight, shard_id)


# shards


@pytest.mark.parametrize("size", SIZES)
def test_column_shards_concatenate_to_the_full_weight(size: int) -> None:
    weight, bias = torch.randn(16, HIDDEN, generator=rng()), torch.randn(16, generator=rng(1))
    layers = [
        ColumnParallelLinear(HIDDEN, 16, dtype=torch.float32, tp=tp, bias=True)
        for tp in ranks(size)
    ]
    for layer in layers:
        load(layer, weight)
        layer.bias.weight_loader(layer.bias, bias, None)
    assert torch.equal(torch.cat([layer.weight for layer in layers]), weight)
    assert torch.equal(torch.cat([layer.bias for layer in layers]), bias)
    x = torch.randn(5, HIDDEN, generator=rng(2))
    whole = torch.cat([layer(x) for layer in layers], dim=1)
    torch.testing.assert_close(whole, F.linear(x, weight, bias))


@pytest.mark.parametrize("size", SIZES)
def test_row_shards_concatenate_and_their_products_add_up(size: int) -> None:
    weight, bias = torch.randn(10, 16, generator=rng()), torch.randn(10, generator=rng(1))
    layers = [
        RowParallelLinear(16, 10, dtype=torch.float32, tp=tp, bias=True) for tp in ranks(size)
    ]
    for layer in layers:
        load(layer, weight)
        layer.bias.weight_loader(layer.bias, bias, None)
    assert torch.equal(torch.cat([layer.weight for layer in layers], dim=1), weight)
    x = torch.randn(5, 16, generator=rng(2))
    partial = [
        F.linear(part, layer.weight)
        for layer, part in zip(layers, x.chunk(size, dim=1), strict=True)
    ]
    torch.testing.assert_close(sum(partial) + bias, F.linear(x, weight, bias))


@pytest.mark.parametrize("size", SIZES)
def test_merged_shards_hold_their_part_of_each_weight(size: int) -> None:
    """Gate and up of one rank side by side, so that its half of the MLP needs no other rank."""
    parts = [torch.randn(n, HIDDEN, generator=rng(n)) for n in (16, 32)]
    layers = [
        MergedColumnParallelLinear(HIDDEN, [16, 32], dtype=torch.float32, tp=tp)
        for tp in ranks(size)
    ]
    for layer in layers:
        for i in (1, 0):  # order doesn't matter
            load(layer, parts[i], i)
    shards = [layer.weight.split([16 // size, 32 // size]) for layer in layers]
    for i, part in enumerate(parts):
        assert torch.equal(torch.cat([shard[i] for shard in shards]), part)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_qkv_shards_concatenate_with_replicated_kv_heads(size: int, num_kv_heads: int) -> None:
    """With fewer KV heads than ranks each is held by as many ranks as share its queries."""
    num_heads = 8
    full = {
        "q": torch.randn(num_heads * HEAD_DIM, HIDDEN, generator=rng()),
        "k": torch.randn(num_kv_heads * HEAD_DIM, HIDDEN, generator=rng(1)),
        "v": torch.randn(num_kv_heads * HEAD_DIM, HIDDEN, generator=rng(2)),
    }
    layers = [
        QKVParallelLinear(HIDDEN, HEAD_DIM, num_heads, num_kv_heads, dtype=torch.float32, tp=tp)
        for tp in ranks(size)
    ]
    for layer in layers:
        for name, weight in full.items():
            load(layer, weight, name)
    kv_size = num_kv_heads_of_rank(num_kv_heads, size) * HEAD_DIM
    sizes = [num_heads // size * HEAD_DIM, kv_size, kv_size]
    q, k, v = zip(*[layer.weight.split(sizes) for layer in layers], strict=True)
    assert torch.equal(torch.cat(q), full["q"])
    copies = max(size // num_kv_heads, 1)
    for shards, name in ((k, "k"), (v, "v")):
        assert torch.equal(torch.cat(shards[::copies]), full[name])
        for rank, shard in enumerate(shards):
            assert torch.equal(shard, shards[rank // copies * copies])


def test_every_query_head_meets_its_kv_head_on_its_rank() -> None:
    """Query head i attends with KV head i * kv_heads // heads, whatever the ranks."""
    num_heads, num_kv_heads = 8, 2
    k = torch.arange(num_kv_heads).repeat_interleave(HEAD_DIM).float()[:, None].expand(-1, HIDDEN)
    for size in SIZES:
        for tp in ranks(size):
            layer = QKVParallelLinear(
                HIDDEN, HEAD_DIM, num_heads, num_kv_heads, dtype=torch.float32, tp=tp
            )
            load(layer, k.contiguous(), "k")
            start = layer.num_heads * HEAD_DIM
            held = layer.weight[start : start + layer.num_kv_heads * HEAD_DIM : HEAD_DIM, 0]
            group = layer.num_heads // layer.num_kv_heads
            for local in range(layer.num_heads):
                head = tp.rank * layer.num_heads + local
                assert int(held[local // group]) == head * num_kv_heads // num_heads


def test_replicated_layer_holds_everything() -> None:
    weight = torch.randn(10, HIDDEN, generator=rng())
    for tp in ranks(4):
        layer = ReplicatedLinear(HIDDEN, 10, dtype=torch.float32, tp=tp)
        load(layer, weight)
        assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab_size", [1000, 1001, 1007, 8, 57])
def test_vocabulary_shards_concatenate(size: int, vocab_size: int) -> None:
    """Also where the vocabulary can't be split evenly: the last rank holds fewer rows."""
    weight = torch.randn(vocab_size, HIDDEN, generator=rng())
    heads = [ParallelLMHead(vocab_size, HIDDEN, dtype=torch.float32, tp=tp) for tp in ranks(size)]
    for head in heads:
        load(head, weight)
    assert torch.equal(torch.cat([head.weight for head in heads]), weight)
    starts = [head.vocab_start for head in heads]
    ends = [head.vocab_start + len(head.weight) for head in heads]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == vocab_size


def test_vocabulary_too_small_for_the_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="vocab_size 9 leaves rank 5 of 8 nothing"):
        VocabParallelEmbedding(9, HIDDEN, dtype=torch.float32, tp=Communicator(5, 8))


class _Summing(Communicator):
    """A rank whose all_reduce keeps what it is given, for a test to add up."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize("size", SIZES)
def test_embeddings_of_all_ranks_add_up(size: int) -> None:
    weight = torch.randn(57, HIDDEN, generator=rng())
    ids = torch.tensor([0, 56, 7, 8, 28, 29, 55], dtype=torch.int32)
    total = torch.zeros(len(ids), HIDDEN)
    for rank in range(size):
        layer = VocabParallelEmbedding(57, HIDDEN, dtype=torch.float32, tp=_Summing(rank, size))
        load(layer, weight)
        total += layer(ids)
    assert torch.equal(total, weight[ids.long()])


MAKERS: list[Callable[[Communicator], object]] = [
    lambda tp: ColumnParallelLinear(HIDDEN, 15, dtype=torch.float32, tp=tp),
    lambda tp: RowParallelLinear(15, HIDDEN, dtype=torch.float32, tp=tp),
    lambda tp: MergedColumnParallelLinear(HIDDEN, [16, 15], dtype=torch.float32, tp=tp),
    lambda tp: QKVParallelLinear(HIDDEN, HEAD_DIM, 6, 2, dtype=torch.float32, tp=tp),
    lambda tp: QKVParallelLinear(HIDDEN, HEAD_DIM, 4, 3, dtype=torch.float32, tp=tp),
]


@pytest.mark.parametrize("make", MAKERS)
def test_sizes_that_do_not_divide_are_an_error(make: Callable[[Communicator], object]) -> None:
    with pytest.raises(ValueError, match="can't be split evenly over .* ranks"):
        make(Communicator(0, 4))


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_shapes_are_an_error_in_every_layer(size: int) -> None:
    """Longer ones too, which would load in part."""
    tp = Communicator(size - 1, size)
    layers: list[tuple[LinearBase | VocabParallelEmbedding, tuple[int, int], object]] = [
        (ColumnParallelLinear(8, 4, dtype=torch.float32, tp=tp), (4, 8), None),
        (RowParallelLinear(8, 4, dtype=torch.float32, tp=tp), (4, 8), None),
        (MergedColumnParallelLinear(8, [4, 4], dtype=torch.float32, tp=tp), (4, 8), 1),
        (QKVParallelLinear(8, 2, 4, 2, dtype=torch.float32, tp=tp), (8, 8), "q"),
        (QKVParallelLinear(8, 2, 4, 2, dtype=torch.float32, tp=tp), (4, 8), "k"),
        (VocabParallelEmbedding(10, 8, dtype=torch.float32, tp=tp), (10, 8), None),
    ]
    for layer, (rows, columns), shard_id in layers:
        load(layer, torch.zeros(rows, columns), shard_id)
        wrong = [(rows + 2, columns), (rows - 2, columns), (rows, columns + 2), (2 * rows, columns)]
        wrong += [(rows, 2 * columns), (rows,), (1, rows, columns), ()]
        for shape in wrong:
            with pytest.raises(ValueError, match="its shape is"):
                load(layer, torch.zeros(shape), shard_id)


# ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_is_its_definition(dtype: torch.dtype) -> None:
    x = torch.randn(7, 32, generator=rng()).to(dtype) * 3
    norm = RMSNorm(32, 1e-6, dtype=dtype)
    norm.weight.data.copy_(torch.randn(32, generator=rng(1)))
    right = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    right = right * norm.weight.double()
    out, residual = norm(x)
    assert out.dtype == dtype
    assert residual is x
    # One rounding to the dtype (two where the norm is rounded before the weight).
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), right, rtol=2 * eps, atol=1e-6)

    addend, stream = torch.randn(7, 32, generator=rng(2)).to(dtype), x.clone()
    out, residual = norm(addend, stream)
    total = (x.float() + addend.float()).to(dtype)
    assert residual is stream
    assert torch.equal(stream, total)
    torch.testing.assert_close(out, norm(total)[0], rtol=2 * eps, atol=1e-6)


def test_silu_and_mul_takes_gate_then_up() -> None:
    gate, up = torch.randn(2, 5, 16, generator=rng())
    out = SiluAndMul()(torch.cat((gate, up), dim=1))
    torch.testing.assert_close(out, F.silu(gate) * up)


@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_rotation_is_that_of_transformers(theta: float) -> None:
    heads, kv_heads, head_dim, positions = 4, 2, 16, torch.tensor([0, 1, 17, 4000, 39999])
    config = Qwen3Config(
        head_dim=head_dim,
        max_position_embeddings=40000,
        rope_theta=theta,  # for transformers 4
        rope_parameters={"rope_theta": theta, "rope_type": "default"},
    )
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    qkv = torch.randn(len(positions), (heads + 2 * kv_heads) * head_dim, generator=rng())
    ones, slots = torch.ones(head_dim), torch.arange(len(positions), dtype=torch.int32)
    k_cache, v_cache = torch.zeros(2, 2, 4, kv_heads, head_dim)
    table = RotaryEmbedding(head_dim, 40000, theta).cos_sin_cache
    q = qk_norm_rope_store_torch(
        qkv, ones, ones, 1e-6, table, positions, k_cache, v_cache, slots, heads, kv_heads, head_dim
    )
    normed = F.rms_norm(qkv.view(len(positions), -1, head_dim), (head_dim,), eps=1e-6)
    right_q, right_k = apply_rotary_pos_emb(
        normed[None, :, :heads].transpose(1, 2),
        normed[None, :, heads : heads + kv_heads].transpose(1, 2),
        cos,
        sin,
    )
    # float32 angles of 40,000 radians are off by 2e-3 in either implementation, but equally.
    torch.testing.assert_close(q, right_q[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
    stored = k_cache.flatten(0, 1)[: len(positions)]
    torch.testing.assert_close(stored, right_k[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
    right_v = qkv.view(len(positions), -1, head_dim)[:, heads + kv_heads :]
    assert torch.equal(v_cache.flatten(0, 1)[: len(positions)], right_v)


# attention


def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """One sequence, query by query: q is (queries, heads, head_dim), from position start on."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for i in range(len(q)):
        for head in range(q.shape[1]):
            keys = k[: start + i + 1, head // group]
            weights = (keys @ q[i, head] * scale).softmax(dim=0)
            out[i, head] = weights @ v[: start + i + 1, head // group]
    return out


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("kind", ["prefill", "decode", "both"])
def test_torch_attention_is_the_naive_one(
    block_size: int, heads: int, kv_heads: int, kind: str
) -> None:
    """Fresh, chunked and single-token lanes over shuffled blocks, unused table columns poisoned."""
    head_dim = 8
    prefills = [] if kind == "decode" else [(0, 1), (0, 9), (5, 4), (13, 1), (4, 8)]
    decodes = [] if kind == "prefill" else [(0, 1), (6, 1), (16, 1)]
    lanes = prefills + decodes  # (first position, tokens)
    lens = [start + count for start, count in lanes]
    blocks_of = [-(-length // block_size) for length in lens]
    order = torch.randperm(sum(blocks_of) + 3, generator=rng()).tolist()
    tables = torch.full((len(lanes), max(blocks_of) + 2), 2**30, dtype=torch.int32)
    shape = (sum(blocks_of) + 3, block_size, kv_heads, head_dim)
    attention = Attention(head_dim, torch_backend())
    attention.bind_kv_cache(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
    attention.k_cache[:], attention.v_cache[:] = 7.0, 7.0  # finite, as in a pool, but wrong
    q, k_new, v_new, slots, right = [], [], [], [], []
    for lane, (start, count) in enumerate(lanes):
        blocks = torch.tensor([order.pop() for _ in range(blocks_of[lane])])
        tables[lane, : len(blocks)] = blocks
        k, v = torch.randn(2, lens[lane], kv_heads, head_dim, generator=rng(lane))
        places = torch.arange(lens[lane])
        lane_slots = blocks[places // block_size] * block_size + places % block_size
        attention.k_cache.flatten(0, 1)[lane_slots[:start]] = k[:start]
        attention.v_cache.flatten(0, 1)[lane_slots[:start]] = v[:start]
        lane_q = torch.randn(count, heads, head_dim, generator=rng(100 + lane))
        right.append(naive_attention(lane_q, k, v, start, attention.scale))
        q.append(lane_q)
        k_new.append(k[start:])
        v_new.append(v[start:])
        slots.append(lane_slots[start:])
    counts = torch.tensor([0] + [count for _, count in prefills], dtype=torch.int32)
    context = Context(
        num_prefills=len(prefills),
        num_prefill_tokens=int(counts.sum()),
        num_decodes=len(decodes),
        slot_mapping=torch.cat(slots).int(),
        block_tables=tables,
        context_lens=torch.tensor(lens, dtype=torch.int32),
        cu_seqlens_q=counts.cumsum(0).int(),
        cu_seqlens_k=torch.tensor([0, *lens[: len(prefills)]]).cumsum(0).int(),
        max_seqlen_q=int(counts.max()),
        max_seqlen_k=max(lens),
        logits_indices=None,
    )
    with set_context(context):
        out = attention(torch.cat(q), torch.cat(k_new), torch.cat(v_new))
    torch.testing.assert_close(out, torch.cat(right).flatten(1), atol=1e-5, rtol=1e-5)


def test_context_is_there_inside_of_a_step_only() -> None:
    with pytest.raises(RuntimeError, match="only inside a model's forward"):
        get_context()


class Machine:
    """A machine with a GPU and some packages, for `select_backend` alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: int, *packages: str) -> None:
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name: name if name in packages else None
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))

    def select(self, wish: str, **changes: object) -> tuple[str, str]:
        facts = {"dtype": torch.bfloat16, "block_size": 256, "head_dim": 128, **changes}
        backend = select_backend(wish, device=torch.device("cuda"), **facts)
        return backend.prefill_name, backend.decode_name


def test_missing_package_is_an_import_error_with_the_pip_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, 9)
    with pytest.raises(ImportError, match="pip install flash-attn.*'triton'"):
        machine.select("flash_attn")
    with pytest.raises(ImportError, match="pip install triton"):
        machine.select("triton")
    assert machine.select("auto") == ("torch", "torch")


def test_explicit_backend_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 8, "flash_attn", "triton")
    with pytest.raises(ValueError, match="'flash_attn' needs bfloat16 or float16, not .*float32"):
        machine.select("flash_attn", dtype=torch.float32)
    with pytest.raises(ValueError, match="multiple of 256, not 16: .*'triton'"):
        machine.select("flash_attn", block_size=16)
    with pytest.raises(ValueError, match="head_dim .* not 300"):
        machine.select("flash_attn", head_dim=300)
    for block_size in (1, 8, 24, 100):
        with pytest.raises(ValueError, match=f"power of two of at least 16, not {block_size}"):
            machine.select("triton", block_size=block_size)
    for head_dim in (8, 300):
        with pytest.raises(ValueError, match=f"head_dim from 16 to 256, not {head_dim}"):
            machine.select("triton", head_dim=head_dim)
    # auto takes what fits.
    assert machine.select("auto", head_dim=512) == ("torch", "torch")
    assert machine.select("auto", block_size=16, dtype=torch.float32) == ("triton", "triton")
    assert machine.select("auto", block_size=7) == ("torch", "torch")
    assert machine.select("triton") == ("triton", "triton")


def test_backend_for_cpu_is_torch_alone() -> None:
    cpu = {"device": torch.device("cpu"), "dtype": torch.float32, "block_size": 3, "head_dim": 8}
    for wish in ("auto", "torch"):
        backend = select_backend(wish, **cpu)
        assert (backend.prefill_name, backend.decode_name) == ("torch", "torch")
    for wish in ("triton", "flash_attn"):
        with pytest.raises(ValueError, match=f"'{wish}' needs a GPU"):
            select_backend(wish, **cpu)
