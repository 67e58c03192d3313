"""One rank: build the model, size and own the KV cache, run batches.

The runner knows rows and blocks, never sequences: everything it is told is in `ScheduledBatch`.
What it must remember between steps, it remembers by row, on the device (`kernels.row_state`), so
that a decode step is told only what changed and, with graphs, is one launch.

`launch` enqueues a step and returns at once; `wait` on what it returns reads the tokens. On CPU a
step is done when `launch` returns, and everything else is the same.
"""

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.engine.batch import (
    HEADER_WORDS,
    NEW_BLOCK_WORDS,
    NEW_ROW_WORDS,
    ScheduledBatch,
    apply_new_blocks,
    flatten,
    new_row,
)
from nanovllm.engine.cuda_graph import StepGraphs, decode_shapes, mixed_shapes, side_stream
from nanovllm.engine.kv_cache import (
    GpuMemory,
    allocate_pool,
    num_blocks_on_cpu,
    num_blocks_on_gpu,
)
from nanovllm.engine.second_pass import PendingLogprobs, SecondPass, StepResult
from nanovllm.engine.settings import RunnerSettings
from nanovllm.kernels.compiling import compile_launches
from nanovllm.kernels.gemm import ROWS_OF_EACH_KIND
from nanovllm.kernels.row_state import (
    RowState,
    StepBuffers,
    StepShape,
    apply_updates,
    apply_updates_torch,
    commit_tokens,
    fetch_wire,
    step_inputs,
    step_inputs_torch,
)
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backend import select_backend
from nanovllm.layers.linear import num_kv_heads_of_rank
from nanovllm.layers.sampler import Sampler
from nanovllm.models import build_network
from nanovllm.outputs import RunnerDescription
from nanovllm.utils.context import Context, set_context
from nanovllm.utils.distributed import Communicator
from nanovllm.utils.loader import initialize_dummy, load_model, update_weights
from nanovllm.utils.pinned import PinnedRing, Slot, StepSlots

if TYPE_CHECKING:
    from nanovllm.kernels.decode_attention import DecodePlan

# Prompt tokens of a step that launches the kernels of the largest. With fewer, ranks may sum by
# kernels of their own.
_NUM_TOKENS_OF_MANY = 1024
_GRAPH_NODE_BYTES = 8 << 20  # of each graph, beside the memory that all of them share


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step on the device."""

    input_ids: torch.Tensor  # (tokens,) int32
    positions: torch.Tensor  # (tokens,) int32
    rows: torch.Tensor  # (lanes,) int64
    ends: torch.Tensor  # (lanes,) int32 position of the token to draw
    temperatures: torch.Tensor  # (lanes,) float32
    seeds: torch.Tensor  # (lanes,) int64
    context: Context
    logits: torch.Tensor | None = None  # (lanes, vocabulary) where they are to be written, if fixed
    keeps_hidden_states: bool = False  # logprobs of a prompt are read off them


class PendingTokens:
    """The tokens of a launched step, one a lane."""

    def __init__(
        self,
        tokens: np.ndarray,
        event: torch.cuda.Event | Slot | None,
        logprobs: PendingLogprobs | None = None,
    ) -> None:
        self._tokens = tokens  # (lanes,) int32, valid once the event has passed
        self._event = event
        self._logprobs = logprobs

    def wait(self) -> list[int]:
        """Block until the step is done and return its tokens."""
        if self._event is not None:
            self._event.synchronize()
        return self._tokens.tolist()

    def wait_logprobs(self) -> np.ndarray | None:
        """The logprobs that its rows asked for, as `logprobs.read_rows` takes them, if any did."""
        return self._logprobs.wait() if self._logprobs is not None else None


class ModelRunner:
    """One rank of the engine. It touches no scheduler state."""

    is_lost = False  # only rank processes get lost: see `WorkerGroup`

    def __init__(self, settings: RunnerSettings, tp: Communicator | None = None) -> None:
        """Build the model on this rank's device and load its weights."""
        config, model_config = settings.config, settings.model_config
        self.tp = tp or Communicator()
        self.settings = settings
        self.block_size = config.kvcache_block_size
        self.max_num_seqs = settings.max_num_seqs
        self.device = torch.device(settings.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
            self._free_bytes_before, _ = torch.cuda.mem_get_info()
        self.backend = select_backend(
            config.attention_backend,
            device=self.device,
            dtype=settings.dtype,
            block_size=self.block_size,
            head_dim=model_config.head_dim,
        )
        self.model = build_network(
            model_config,
            max_model_len=settings.max_model_len,
            backend=self.backend,
            dtype=settings.dtype,
            tp=self.tp,
            device=self.device,
        )
        if config.load_format == "dummy":
            initialize_dummy(self.model)
        else:
            load_model(self.model, settings.folder)
        self.sampler = Sampler(self.tp, self.model.lm_head.vocab_start)
        self.graphs: StepGraphs | None = None
        self._side_stream: torch.cuda.Stream | None = None  # of captured mixed steps
        self.kv_cache: torch.Tensor | None = None
        self.compile_s = 0.0  # what `compile_kernels` took
        self._allocate_buffers()

    @property
    def runs_at_launch(self) -> bool:
        """Whether `launch` returns when the step is done (on a CPU), not once it is enqueued."""
        return self.device.type == "cpu"

    # start-up

    def _allocate_buffers(self) -> None:
        """Everything of fixed size and address that steps use."""
        max_blocks = -(-self.settings.max_model_len // self.block_size)
        self.block_tables = np.zeros((self.max_num_seqs, max_blocks), dtype=np.int32)
        self.row_state = RowState.allocate(self.max_num_seqs, max_blocks, self.device)
        self.second_pass = SecondPass(
            self.model.lm_head, self.row_state, self.settings.max_model_len
        )
        self._prompt_hidden_states: torch.Tensor | None = None
        shapes = self._shapes()
        max_tokens = max(shape.num_tokens for shape in shapes)
        max_lanes = max(shape.num_lanes for shape in shapes)
        self.buffers = StepBuffers.allocate(max_tokens, max_lanes, max_blocks, self.device)
        self.decode_plan = self._allocate_plan() if self.backend.needs_plan else None
        if self.device.type == "cuda":
            # The header; each lane's row, start and perhaps a new block; each prompt's length, new
            # row and block table; all prompt tokens of a mixed step.
            wire_words = HEADER_WORDS + (2 + NEW_BLOCK_WORDS) * max_lanes
            max_prefills = max(shape.num_prefills for shape in shapes)
            wire_words += max_prefills * (1 + NEW_ROW_WORDS + NEW_BLOCK_WORDS * max_blocks)
            wire_words += max(shape.num_prefill_tokens for shape in shapes)
            self.slots = StepSlots(wire_words, max_lanes, self.device)
            self.wire = torch.zeros(wire_words, dtype=torch.int32, device=self.device)
            self.tokens = torch.zeros(max_lanes, dtype=torch.int32, device=self.device)
            # Fixed, so that what a graph leaves there can be read by the second pass.
            self.logits = torch.zeros(
                max_lanes,
                self.model.lm_head.num_rows,
                dtype=self.settings.dtype,
                device=self.device,
            )
            self.uploads = PinnedRing(wire_words)  # of steps that read no slot
            self.downloads = PinnedRing(max_lanes)

    def _shapes(self) -> list[StepShape]:
        """Shapes of steps that may be captured."""
        mixed = mixed_shapes(self.max_num_seqs, self.settings.max_num_mixed_tokens)
        return decode_shapes(self.max_num_seqs) + mixed

    def _allocate_plan(self) -> "DecodePlan":
        from nanovllm.kernels.decode_attention import DecodePlan

        model_config, size = self.settings.model_config, self.tp.size
        return DecodePlan.allocate(
            self.max_num_seqs,
            model_config.num_attention_heads // size,
            num_kv_heads_of_rank(model_config.num_key_value_heads, size),
            model_config.head_dim,
            self.block_size,
            self.device,
            self.settings.dtype,
        )

    def compile_kernels(self) -> None:
        """Compile what steps of any size launch, side by side. Needs a pool of at least one block.

        Raises:
            Exception: A kernel doesn't compile.
        """
        start = time.perf_counter()
        compile_launches(self._run_each_kind, self.tp.size)
        self.compile_s = time.perf_counter() - start

    def _run_each_kind(self) -> None:
        """Run small steps that together call every kernel, but while compiling launch none.

        So `buffers` stay zero, which are valid ids. Drawn tokens are whatever memory holds: nothing
        here reads them, and they are zeroed at the end.
        """
        with _own_modes(self.device):
            self.second_pass.warmup(
                StepResult(self.logits[:1], self.buffers.ends[:1], self.tokens[:1], None)
            )
            self.wire.zero_()
            num_lanes = sorted({min(n, self.max_num_seqs) for n in ROWS_OF_EACH_KIND})
            mixed = [shape for shape in self._shapes() if shape.num_prefills]
            for shape in [StepShape(0, 0, n) for n in num_lanes] + mixed[:1]:
                self._run_shape(shape)
        limits = (self.settings.config.max_num_batched_tokens, self.settings.max_model_len - 1)
        self.run(_dummy_prefill([min(_NUM_TOKENS_OF_MANY, *limits)]))
        self.tokens.zero_()
        self.row_state.last_tokens.zero_()

    def warmup_model(self) -> None:
        """Run the largest prefill and the largest decode, sampler included.

        What they allocate stays with the allocator, so that memory measured afterwards includes
        it. Needs a pool of at least one block.
        """
        config = self.settings.config
        num_lanes = self.max_num_seqs
        longest = self.settings.max_model_len - 1
        per_lane = min(longest, config.max_num_batched_tokens // num_lanes)
        lengths = [per_lane] * num_lanes
        spare = config.max_num_batched_tokens - sum(lengths)
        for lane in range(num_lanes):
            extra = min(spare, longest - per_lane)
            lengths[lane] += extra
            spare -= extra
        self.run(_dummy_prefill(lengths))
        self.run(_dummy_decode([longest - 1] * self.max_num_seqs))
        if self.device.type == "cuda":
            with torch.inference_mode():
                self.second_pass.warmup(
                    StepResult(self.logits, self.buffers.ends, self.tokens, None)
                )

    def allocate_kv_cache(self) -> int:
        """Size the KV cache, allocate it zeroed, bind the layers to it; return its blocks.

        Under tensor parallelism it is the smallest that any rank has room for.

        Raises:
            ValueError: There is no room for a single block; the text names the numbers and the
                knob.
        """
        self._bind_pool(1)
        if self.device.type == "cuda":
            self.compile_kernels()
            self.warmup_model()
        num_blocks = self.settings.config.num_kvcache_blocks
        if num_blocks is None:
            num_blocks = self._num_blocks_that_fit()
        num_blocks = self.tp.min(num_blocks, self.device)
        self._bind_pool(num_blocks)
        return num_blocks

    def describe(self) -> RunnerDescription:
        """What the engine's stats tell of this rank."""
        return RunnerDescription(
            device=str(self.device),
            block_bytes=self.block_bytes,
            prefill_name=self.backend.prefill_name,
            decode_name=self.backend.decode_name,
            graph_sizes=self.graphs.sizes if self.graphs is not None else (),
            all_reduce=self.tp.all_reduce_name,
            compile_s=self.compile_s,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank, all layers, keys and values."""
        model_config = self.settings.model_config
        num_kv_heads = num_kv_heads_of_rank(model_config.num_key_value_heads, self.tp.size)
        elements = 2 * model_config.num_hidden_layers * num_kv_heads * model_config.head_dim
        return elements * self.block_size * self.settings.dtype.itemsize

    def _bind_pool(self, num_blocks: int) -> None:
        """Allocate one zeroed pool, (2, layers, blocks, block_size, kv_heads, head_dim)."""
        model_config = self.settings.model_config
        layers = self._release_pool()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # else the pool may share a segment that sleep() can't free
        shape = (
            2,
            len(layers),
            num_blocks,
            self.block_size,
            num_kv_heads_of_rank(model_config.num_key_value_heads, self.tp.size),
            model_config.head_dim,
        )
        self.kv_cache = allocate_pool(shape, self.settings.dtype, self.device)
        for layer, k_cache, v_cache in zip(layers, *self.kv_cache, strict=True):
            layer.bind_kv_cache(k_cache, v_cache)

    def _release_pool(self) -> list[Attention]:
        """Let the pool go and return the layers that were bound to it."""
        layers = [module for module in self.model.modules() if isinstance(module, Attention)]
        for layer in layers:
            layer.k_cache = layer.v_cache = torch.empty(0)
        self.kv_cache = None
        return layers

    def _num_blocks_that_fit(self) -> int:
        if self.device.type == "cpu":
            num_wanted = self.max_num_seqs * -(-self.settings.max_model_len // self.block_size)
            return num_blocks_on_cpu(num_wanted, self.block_bytes)
        torch.cuda.synchronize()
        # Before anything is given back: what the largest steps took must stay available to them.
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        memory = GpuMemory(
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            own_bytes=self._free_bytes_before - free_bytes,
            graph_bytes=self._measure_graph_bytes(),
        )
        utilization = self.settings.config.gpu_memory_utilization
        return num_blocks_on_gpu(memory, utilization=utilization, block_bytes=self.block_bytes)

    @property
    def _wants_graphs(self) -> bool:
        is_cuda = self.device.type == "cuda"
        return is_cuda and self.backend.is_capturable and not self.settings.config.enforce_eager

    def _measure_graph_bytes(self) -> int:
        """Device memory that captures will take: the largest is captured, measured, discarded."""
        if not self._wants_graphs:
            return 0
        torch.cuda.synchronize()
        free_before, _ = torch.cuda.mem_get_info()
        shapes = self._shapes()
        graphs = self._try_capture([max(shapes, key=lambda shape: shape.num_tokens)])
        free_after, _ = torch.cuda.mem_get_info()
        if graphs is not None:
            graphs.release()
        torch.cuda.empty_cache()
        # Later, smaller captures share its pool.
        return max(free_before - free_after, 0) + len(shapes) * _GRAPH_NODE_BYTES

    def capture_cudagraph(self) -> None:
        """Capture a ladder of step shapes, or leave those steps eager."""
        if self._wants_graphs:
            self.graphs = self._try_capture(self._shapes())

    def _try_capture(self, shapes: list[StepShape]) -> StepGraphs | None:
        self._side_stream = side_stream(torch.cuda.current_device())
        self.slots.clear()  # steps without lanes: all of them are padding
        try:
            with torch.inference_mode():
                return StepGraphs(shapes, self._run_shape)
        except RuntimeError as error:
            warnings.warn(f"CUDA graph capture failed, decoding eagerly: {error}", stacklevel=2)
            return None
        finally:
            self.synchronize()
            self.slots.resync()  # shapes ran and took turns without `fill`

    def run(self, batch: ScheduledBatch) -> list[int]:
        """Run one step and return a token for each lane."""
        return self.launch(batch).wait()

    def launch(self, batch: ScheduledBatch) -> PendingTokens:
        """Enqueue one step; its tokens start their way back as soon as they are drawn."""
        if len(batch.new_blocks):
            apply_new_blocks(batch, self.block_tables)
        if len(batch.new_rows):
            with _own_modes(self.device):
                self.second_pass.take(batch)
        captured = self._captured_form(batch)
        if captured is not None:
            pending = self._replay(batch, *captured)
            if not self.second_pass.concerns(batch):
                return pending  # nothing up to here depends on torch's modes
        with _own_modes(self.device):
            if captured is not None:
                result = StepResult(self.logits, self.buffers.ends, self.tokens, None)
            else:
                prepare = self.prepare_prefill if batch.num_prefills else self.prepare_decode
                result = self._run_step(prepare(batch))
            logprobs = self.second_pass.run(batch, result)
            if captured is None and self.device.type == "cpu":
                return PendingTokens(result.tokens.numpy(), None, logprobs)
            tokens, event = self.downloads.download(result.tokens)
            return PendingTokens(tokens[: batch.num_lanes], event, logprobs)

    def _captured_form(self, batch: ScheduledBatch) -> tuple[StepShape, np.ndarray] | None:
        """The shape and the wire by which a graph runs `batch`; None: it is run eagerly."""
        shape = self.graphs.shape_for(batch) if self.graphs else None
        if shape is None or self.second_pass.reads_prompts(batch):  # a graph keeps no hidden states
            return None
        wire = batch.to_wire()
        wire = wire[: len(wire) - len(batch.row_params)]
        return (shape, wire) if len(wire) <= self.slots.num_words else None

    def _replay(self, batch: ScheduledBatch, shape: StepShape, wire: np.ndarray) -> PendingTokens:
        assert self.graphs is not None, "no step has been captured"
        self.slots.fill(wire)
        self.graphs.replay(shape)
        slot = self.slots.launched()
        return PendingTokens(slot.tokens[: batch.num_lanes], slot)

    def prepare_prefill(self, batch: ScheduledBatch) -> StepInputs:
        """Inputs of a step with prompt tokens: flattened on the host, uploaded in one copy."""
        flat = flatten(batch, self.block_tables, self.block_size)
        wire, prompt_tokens, rows, positions, slot_mapping, cu_seqlens_q, cu_seqlens_k, ends = (
            self._upload(batch.to_wire(), batch.prompt_tokens, batch.rows, *flat)
        )
        self._apply_updates(wire)
        state, rows, num_prefills = self.row_state, rows.long(), batch.num_prefills
        if self.decode_plan is not None and batch.num_decodes:
            self.decode_plan.update(ends[num_prefills:].contiguous())
        context = Context(
            num_prefills=num_prefills,
            num_prefill_tokens=len(prompt_tokens),
            num_decodes=batch.num_decodes,
            slot_mapping=slot_mapping,
            block_tables=state.block_tables[rows],
            context_lens=ends,
            cu_seqlens_q=cu_seqlens_q[: num_prefills + 1],
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=int(batch.num_tokens.max()),
            max_seqlen_k=int(flat.context_lens.max()),
            logits_indices=cu_seqlens_q[1:] - 1,
            decode_plan=self.decode_plan,
        )
        return StepInputs(
            input_ids=torch.cat((prompt_tokens, state.last_tokens[rows[num_prefills:]])),
            positions=positions,
            rows=rows,
            ends=ends,  # the token to draw comes behind all that its lane sees
            temperatures=state.temperatures[rows],
            seeds=state.seeds[rows],
            context=context,
            keeps_hidden_states=self.second_pass.reads_prompts(batch),
        )

    def prepare_decode(self, batch: ScheduledBatch) -> StepInputs:
        """Inputs of a step of decode lanes only, read from the row state."""
        (wire,) = self._upload(batch.to_wire())
        self._apply_updates(wire)
        shape = StepShape(0, 0, batch.num_lanes)
        return self._inputs_of(shape, wire, int(batch.starts.max()) + 1)

    def run_model(self, inputs: StepInputs) -> torch.Tensor:
        """Logits of each lane's last token: (lanes, this rank's vocabulary)."""
        with set_context(inputs.context):
            hidden_states = self.model(inputs.input_ids, inputs.positions)
            self._prompt_hidden_states = hidden_states if inputs.keeps_hidden_states else None
            return self.model.compute_logits(hidden_states, inputs.logits)

    def _run_step(self, inputs: StepInputs) -> StepResult:
        """Run the network, draw a token for each lane and keep it as its row's newest."""
        logits, tokens = self._draw(inputs)
        self.row_state.last_tokens.index_copy_(0, inputs.rows, tokens)
        hidden_states, self._prompt_hidden_states = self._prompt_hidden_states, None
        return StepResult(logits, inputs.ends, tokens, hidden_states)

    def _draw(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.run_model(inputs)
        return logits, self.sampler(logits, inputs.temperatures, inputs.seeds, inputs.ends)

    def _run_shape(self, shape: StepShape) -> None:
        """What a graph holds: from the slot's wire to the tokens in the slot."""
        slots = self.slots
        fetch_wire(slots.wires, slots.turn, self.wire)
        self._apply_updates(self.wire)
        inputs = self._inputs_of(shape, self.wire, self.settings.max_model_len)
        _, tokens = self._draw(inputs)
        commit_tokens(tokens, inputs.rows, self.row_state, self.tokens, slots.tokens, slots.turn)

    def _inputs_of(self, shape: StepShape, wire: torch.Tensor, max_context_len: int) -> StepInputs:
        """Inputs of a step of `shape`, in the fixed buffers."""
        buffers = self.buffers.of(shape)
        fill = step_inputs if self.device.type == "cuda" else step_inputs_torch
        fill(wire, self.row_state, buffers, shape, self.block_size)
        if self.decode_plan is not None:
            self.decode_plan.update(buffers.context_lens[shape.num_prefills :])
        context = Context(
            num_prefills=shape.num_prefills,
            num_prefill_tokens=shape.num_prefill_tokens,
            num_decodes=shape.num_decodes,
            slot_mapping=buffers.slot_mapping,
            block_tables=buffers.block_tables,
            context_lens=buffers.context_lens,
            cu_seqlens_q=buffers.cu_seqlens_q,
            cu_seqlens_k=buffers.cu_seqlens_k,
            max_seqlen_q=max(shape.num_prefill_tokens, 1),
            max_seqlen_k=max_context_len,
            logits_indices=buffers.logits_indices if shape.num_prefills else None,
            decode_plan=self.decode_plan,
            side_stream=self._side_stream,
        )
        is_cuda = self.device.type == "cuda"
        return StepInputs(
            buffers.input_ids,
            buffers.positions,
            buffers.rows,
            buffers.ends,
            buffers.temperatures,
            buffers.seeds,
            context,
            self.logits[: shape.num_lanes] if is_cuda else None,
        )

    def _apply_updates(self, wire: torch.Tensor) -> None:
        apply = apply_updates if self.device.type == "cuda" else apply_updates_torch
        apply(wire, self.row_state)

    def _upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """int32 arrays on the device, in one copy."""
        lengths = [len(array) for array in arrays]
        packed = np.concatenate(arrays)
        if self.device.type == "cpu":
            target = torch.from_numpy(packed)
        else:
            target = torch.empty(len(packed), dtype=torch.int32, device=self.device)
            self.uploads.upload(packed, target)
        return list(target.split(lengths))

    def load_weights(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Write new values into parameters, in place: graphs go on with them."""
        update_weights(self.model, weights)

    def sleep(self) -> None:
        """Give the KV cache's memory back, and the graphs that know its address."""
        self.synchronize()
        if self.graphs is not None:
            self.graphs.release()
            self.graphs = None
        self._release_pool()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self, num_blocks: int) -> None:
        """Allocate a KV cache of so many blocks, zeroed, and capture graphs over it."""
        self._bind_pool(num_blocks)
        self.capture_cudagraph()

    def synchronize(self) -> None:
        """Wait for everything launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def exit(self) -> None:
        """Give memory back. Graphs first: they refer to everything else."""
        if self.graphs is not None:
            self.synchronize()
            self.graphs.release()
        self.graphs = None
        for parameter in self.model.parameters():
            # It refers back to its layer, and only the collector would free such a circle.
            del parameter.weight_loader  # type: ignore[attr-defined]
        device = self.device
        for name in vars(self):  # whoever still holds this runner holds none of its memory
            setattr(self, name, None)
        if device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _own_modes(device: torch.device) -> Iterator[None]:
    """Inference mode without autocast, whatever the caller has switched on."""
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        yield


def _dummy_prefill(lengths: list[int]) -> ScheduledBatch:
    """Prompts of these lengths in rows 0, 1, ..., all of whose blocks are block 0."""
    rows = np.arange(len(lengths), dtype=np.int32)
    return ScheduledBatch(
        rows=rows,
        starts=np.zeros_like(rows),
        num_tokens=np.array(lengths, dtype=np.int32),
        prompt_tokens=np.zeros(sum(lengths), dtype=np.int32),
        new_rows=np.array([new_row(int(row), 1.0, 0) for row in rows], dtype=np.int32),
        new_blocks=np.stack([rows, rows * 0, rows * 0], axis=1),
    )


def _dummy_decode(positions: list[int]) -> ScheduledBatch:
    """One token at these positions in rows 0, 1, ..."""
    rows = np.arange(len(positions), dtype=np.int32)
    return ScheduledBatch(
        rows=rows,
        starts=np.array(positions, dtype=np.int32),
        num_tokens=np.zeros(0, dtype=np.int32),
    )
