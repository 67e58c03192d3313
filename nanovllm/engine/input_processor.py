"""From what the caller passes to requests that can run.

Prompts in any of their forms are read, encoded and checked against the model and the pool together
with their params, all before anything is queued: a call either runs whole or has changed nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from nanovllm.config import Config
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.logprobs import LogprobLog
from nanovllm.engine.prompt import ParsedPrompt, Prompt, parse_prompt
from nanovllm.engine.request import Request, Sample
from nanovllm.engine.row_params import RowParams
from nanovllm.engine.scheduler import check_fits
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.settings import RunnerSettings
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.model_folder import resolve_model_folder
from nanovllm.utils.tokenizer import Tokenizer

Result = TypeVar("Result")


class InputProcessor:
    """Makes requests and their samples; it queues nothing and holds no request."""

    def __init__(
        self,
        settings: RunnerSettings,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        num_blocks: int,
    ) -> None:
        """Bind what requests are checked against.

        Args:
            settings: What runs.
            tokenizer: None: token ids in, token ids out.
            eos_token_ids: All ids that end a request unless it ignores them.
            num_blocks: Of the KV cache.
        """
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = settings.model_config.vocab_size
        self._max_model_len = settings.max_model_len
        self._max_positions = settings.model_config.max_position_embeddings
        self._seed = settings.config.seed
        self._block_size = settings.config.kvcache_block_size
        self._num_blocks = num_blocks

    def make_requests(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[Request]:
        """Check prompts and params and build their requests, without queueing any.

        Raises:
            ValueError, TypeError: A prompt or its params can't be run; the text names the prompt's
                index.
        """
        parsed = [
            naming(f"prompt {i}", parse_prompt, prompt, self._vocab_size)
            for i, prompt in enumerate(prompts)
        ]
        token_ids = self._encode(parsed)
        requests = []
        for i, (prompt, ids, wish) in enumerate(zip(parsed, token_ids, params, strict=True)):
            naming(f"prompt {i}", self._check_request, ids, wish)
            requests.append(Request(prompt.text, ids, wish, prompt_index=i))
        return requests

    def make_sample(self, request: Request, number: int, index: int) -> Sample:
        """Sample `index` of a request that is the engine's `number`-th."""
        params = request.params
        if index > 0 and params.prompt_logprobs is not None:  # one sample reports it for all
            params = params.replace(prompt_logprobs=None)
        seq = self._make_sequence(request.prompt_token_ids, params, number, index)
        detokenizer = None
        if self._tokenizer is not None and params.detokenize:
            detokenizer = Detokenizer(
                self._tokenizer,
                params.stop,
                params.include_stop_str_in_output,
                params.skip_special_tokens,
                params.min_tokens,
            )
        decode_token = self._tokenizer.decode_token if detokenizer and self._tokenizer else None
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = LogprobLog(1, decode_token)
        logprobs = None
        if params.logprobs is not None:
            logprobs = LogprobLog(len(request.prompt_token_ids), decode_token)
        return Sample(request, index, seq, detokenizer, logprobs)

    def _make_sequence(
        self, prompt_token_ids: list[int], params: SamplingParams, number: int, index: int
    ) -> Sequence:
        if params.seed is not None:  # the same in every call
            seed = derive_seed(1, params.seed, index)
        else:  # the same in a rerun of the script, not in its next call
            seed = derive_seed(0, self._seed, number, index)
        eos_token_ids = frozenset() if params.ignore_eos else self._eos_token_ids
        stops = eos_token_ids.union(params.stop_token_ids)
        return Sequence(
            number,
            prompt_token_ids,
            block_size=self._block_size,
            max_total_tokens=self._max_total_tokens(len(prompt_token_ids), params),
            temperature=params.temperature,
            seed=seed,
            stop_token_ids=stops,
            min_tokens=params.min_tokens,
            row_params=self._row_params(params, len(prompt_token_ids), stops),
            # Logprobs of a prompt token are read where the token before it runs.
            reads_prefix_cache=params.prompt_logprobs is None,
        )

    def _encode(self, prompts: list[ParsedPrompt]) -> list[list[int]]:
        """Token ids of every prompt; texts are encoded together, on all cores."""
        texts = [i for i, prompt in enumerate(prompts) if prompt.token_ids is None]
        if texts and self._tokenizer is None:
            raise ValueError(
                f"prompt {texts[0]} is text, but skip_tokenizer_init=True: pass token ids"
            )
        token_ids = [prompt.token_ids or [] for prompt in prompts]
        if self._tokenizer is not None and texts:
            encoded = self._tokenizer.encode_batch([prompts[i].text or "" for i in texts])
            for i, ids in zip(texts, encoded, strict=True):
                naming(f"prompt {i}", self._check_encoded, ids)
                token_ids[i] = ids
        return token_ids

    def _check_encoded(self, token_ids: list[int]) -> None:
        """Raise unless a text has tokens, all of them in the model's vocabulary."""
        if not token_ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        if max(token_ids) >= self._vocab_size:
            raise ValueError(
                f"the tokenizer's id {max(token_ids)} is outside the model's vocabulary: "
                f"0..{self._vocab_size - 1}"
            )

    def _check_request(self, token_ids: list[int], params: SamplingParams) -> None:
        """Raise unless the prompt and what may follow it fit the model and the pool."""
        if len(token_ids) >= self._max_model_len:
            limit, remedy = "(prompt and output)", "shorten it or raise max_model_len"
            if self._max_model_len == self._max_positions:
                limit, remedy = f"{limit}, all that the model has positions for", "shorten it"
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, max_model_len is {self._max_model_len} "
                f"{limit}: {remedy}"
            )
        if (params.stop or params.bad_words) and self._tokenizer is None:
            raise ValueError("stop and bad_words need a tokenizer: skip_tokenizer_init is True")
        largest = max((token_id for token_id, _ in params.logit_bias), default=0)
        if largest >= self._vocab_size:
            raise ValueError(
                f"logit_bias names token id {largest}, outside the vocabulary: "
                f"0..{self._vocab_size - 1}"
            )
        self._bad_words(params)
        check_fits(
            self._max_total_tokens(len(token_ids), params),
            num_blocks=self._num_blocks,
            block_size=self._block_size,
        )

    def _max_total_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Length, prompt and output, at which a sequence ends."""
        if params.max_tokens is not None:
            return min(num_prompt_tokens + params.max_tokens, self._max_model_len)
        # Up to what fits: the last token is never stored, so it needs no slot.
        num_slots = self._num_blocks * self._block_size
        return max(min(self._max_model_len, num_slots + 1), num_prompt_tokens + 1)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences that must not be drawn; a ValueError for a word without tokens."""
        return self._tokenizer.encode_bad_words(params.bad_words) if self._tokenizer else ()

    def _row_params(
        self, params: SamplingParams, num_prompt_tokens: int, stops: frozenset[int]
    ) -> RowParams | None:
        if not params.is_special:
            return None
        return RowParams(
            params,
            num_prompt_tokens,
            stop_token_ids=sorted(stops),
            bad_words=self._bad_words(params),
        )


def derive_seed(*parts: int) -> int:
    """A 63-bit hash of `parts` alone: collisions apart, other parts, another seed."""
    return xxhash.xxh64_intdigest(np.array(parts, dtype=np.uint64).tobytes()) >> 1


def load_tokenizer(config: Config, folder: Path) -> Tokenizer | None:
    """The tokenizer that was asked for, else that of the model's folder."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        folder = resolve_model_folder(config.tokenizer)
    return Tokenizer.from_folder(folder)


def naming(name: str, function: Callable[..., Result], *args: object) -> Result:
    """Call `function`, with `name` before what it raises."""
    try:
        return function(*args)
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError  # else: UnicodeError, say
        raise kind(f"{name}: {error}") from error
