"""The facade: prompts in, answers out in the order of the prompts."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from tqdm.auto import tqdm

from nanovllm.config import Config
from nanovllm.engine.input_processor import Result, naming
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.request import Request
from nanovllm.outputs import EngineStats, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.tokenizer import Tokenizer, check_encodable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, object]
Params = SamplingParams | Items[SamplingParams] | None

_PROGRESS_SECONDS = 0.2  # between updates of the bar's speeds
_TEMPLATE_ARGUMENTS = frozenset(  # of apply_chat_template, given or decided by `LLM.chat`
    ("messages", "conversation", "tokenize", "add_generation_prompt", "continue_final_message")
)


class LLM:
    """A model ready to answer batches of prompts.

    Invariant: output i answers prompt i, and a call that fails leaves nothing queued.

    Args:
        model: Checkpoint folder, or a hub id that is in the local cache or can be downloaded.
        **options: Fields of `nanovllm.config.Config`, checked there.

    Raises:
        ValueError, TypeError: The model or an option can't be used.
    """

    def __init__(self, model: str, **options: object) -> None:
        self._running: dict[str, object] = {}  # the call that runs, if any
        name = str(model) if isinstance(model, os.PathLike) else model
        self.llm_engine = LLMEngine(Config.from_kwargs(name, **options))

    def generate(
        self,
        prompts: Prompt | Items[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts and return one output each, in their order.

        Args:
            prompts: A text, token ids, vLLM's dict of either, or a list of these.
            sampling_params: One for all, or one for each prompt; None means SamplingParams().
            use_tqdm: Show a progress bar with prefill and decode tokens per second.

        Raises:
            ValueError, TypeError: A prompt or its params can't be run; nothing has been queued.
            RuntimeError: Other requests are queued, another thread is in a call, or the engine has
                been closed.
        """
        with self._call():
            requests = self._make_requests(as_prompt_list(prompts), sampling_params)
            outputs = list(self._run(requests, use_tqdm=use_tqdm))
        return sorted(outputs, key=lambda output: cast(int, output.prompt_index))

    def chat(
        self,
        messages: Items[Message] | Items[Items[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, written out by the model's chat template.

        Args:
            messages: A conversation, [{"role": ..., "content": ...}, ...], or a list of these.
            sampling_params: As in `generate`.
            use_tqdm: As in `generate`.
            add_generation_prompt: End with the beginning of the assistant's turn.
            continue_final_message: Let the model go on with the last message instead.
            chat_template_kwargs: Reach the template (Qwen3's enable_thinking).

        Raises:
            ValueError, TypeError: A conversation can't be written; of several, the text names its
                index. Else as `generate`.
        """
        write = partial(
            chat_prompt,
            self.llm_engine.tokenizer,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        prompts = _of_each(as_conversation_list(messages), write)
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Items[Prompt],
        sampling_params: Params = None,
        deltas: bool = False,
    ) -> Iterator[RequestOutput]:
        """Yield outputs as they finish, each with its `prompt_index`.

        Args:
            prompts: As in `generate`; checked when the iterator is first advanced.
            sampling_params: As in `generate`.
            deltas: Yield every step, with only the new text and token_ids; `.finished` on the last.

        Closing the iterator aborts what still runs.
        """
        with self._call():
            requests = self._make_requests(as_prompt_list(prompts), sampling_params)
            yield from self._run(requests, deltas=deltas)

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The Hugging Face tokenizer of the model."""
        if self.llm_engine.tokenizer is None:
            raise ValueError("there is no tokenizer: skip_tokenizer_init is True")
        return self.llm_engine.tokenizer.get_tokenizer()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; a RuntimeError while requests run."""
        self.llm_engine.reset_prefix_cache()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends; else SamplingParams' own defaults.

        `generate` without params doesn't use it, so that a script runs alike on all models.
        """
        return self.llm_engine.default_sampling_params()

    def load_weights(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Write new values into the model's parameters, in place, and forget cached prefixes.

        Args:
            weights: Names and shapes as in the checkpoint, all of them or some; an iterator may
                produce them one by one. What is a dict or list is checked whole before anything is
                written.

        Raises:
            RuntimeError: Requests run.
            ValueError, TypeError: A tensor has no parameter, another shape or another kind, or
                there is none.
        """
        with self._call():
            self.llm_engine.load_weights(weights)

    def sleep(self) -> None:
        """Give the KV cache's memory back until `wake_up`; an engine that sleeps stays as it is.

        Raises:
            RuntimeError: Requests run, or the engine has been closed.
        """
        with self._call(may_sleep=True):
            self.llm_engine.sleep()

    def wake_up(self) -> None:
        """Take memory for the KV cache again; an engine that is awake stays as it is."""
        self.llm_engine.wake_up()

    def stats(self) -> EngineStats:
        """What the engine has done and what it runs on."""
        return self.llm_engine.stats()

    def exit(self) -> None:
        """Stop and give memory back; calling it again does nothing."""
        self.llm_engine.exit()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.exit()

    @contextmanager
    def _call(self, *, may_sleep: bool = False) -> Iterator[None]:
        """One call at a time, on an engine that has nothing else to do."""
        self.llm_engine.check_usable(may_sleep=may_sleep)
        call = object()
        try:
            # Not a lock: a Ctrl-C may come between its acquire() and `try`, and then nobody would
            # release it. This decides and notes in one step.
            if self._running.setdefault("call", call) is not call:
                raise RuntimeError(
                    "another generate(), chat() or stream() is running on this LLM: finish it, or "
                    "close() the stream"
                )
            if not self.llm_engine.is_finished():
                raise RuntimeError(
                    "requests are queued: step() the engine to the end or abort them"
                )
            yield
        finally:
            if "call" in self._running and self._running["call"] is call:
                del self._running["call"]

    def _make_requests(self, prompts: list[Prompt], params: Params) -> list[Request]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if not isinstance(params, Items):
            raise TypeError(f"sampling_params must be SamplingParams or a list, not {params!r}")
        wishes = list(params)
        for wish in wishes:
            if not isinstance(wish, SamplingParams):
                raise TypeError(f"sampling_params must be SamplingParams, not {wish!r}")
        if len(wishes) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(wishes)} sampling_params")
        return self.llm_engine.make_requests(prompts, wishes)

    def _run(
        self, requests: list[Request], *, deltas: bool = False, use_tqdm: bool = False
    ) -> Iterator[RequestOutput]:
        """Queue requests and yield outputs until all are done; abort them on the way out."""
        engine = self.llm_engine
        progress = _Progress(len(requests)) if use_tqdm else None
        try:
            engine.add(requests)
            while not engine.is_finished():
                outputs = engine.step(deltas)
                if progress is not None:
                    progress.update(engine, len(outputs))
                yield from outputs
        finally:
            try:
                engine.abort_all(requests)
            except BaseException:  # a Ctrl-C that came as it began
                engine.abort_all(requests)
                raise
            if progress is not None:
                progress.close()


class _Progress:
    """A bar over requests that shows prefill and decode speed, averaged over the call."""

    def __init__(self, num_requests: int) -> None:
        self._bar = tqdm(total=num_requests, desc="Generating", dynamic_ncols=True)
        self._last_step = self._last_shown = perf_counter()
        self._num_tokens = {"Prefill": 0, "Decode": 0}
        self._seconds = {"Prefill": 0.0, "Decode": 0.0}

    def update(self, engine: LLMEngine, num_finished: int) -> None:
        """Count finished requests, and the tokens of the step just waited for."""
        now = perf_counter()
        seconds, self._last_step = now - self._last_step, now
        counts = engine.last_step
        kind = "Prefill" if counts.num_prompt_tokens else "Decode"
        self._num_tokens[kind] += counts.num_prompt_tokens or counts.num_decode_tokens
        self._seconds[kind] += seconds
        if now - self._last_shown > _PROGRESS_SECONDS:
            self._last_shown = now
            self._show_speeds()
        if num_finished:
            self._bar.update(num_finished)

    def close(self) -> None:
        self._show_speeds()
        self._bar.close()

    def _show_speeds(self) -> None:
        speeds = {
            kind: f"{num_tokens / self._seconds[kind]:.0f}tok/s"
            for kind, num_tokens in self._num_tokens.items()
            if num_tokens
        }
        self._bar.set_postfix(speeds, refresh=False)


def as_prompt_list(prompts: Prompt | Items[Prompt]) -> list[Prompt]:
    """One prompt or many as a list: a str, a dict and a flat list of ints are one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 and prompts.dtype.kind in "iu" else list(prompts)
    if not isinstance(prompts, Items):
        raise TypeError(f"prompts must be a str, token ids or a list, not {type(prompts).__name__}")
    if len(prompts) and all(isinstance(item, int | np.integer) for item in prompts):
        return [cast(Prompt, prompts)]
    return [cast(Prompt, prompt) for prompt in prompts]


def chat_prompt(
    tokenizer: Tokenizer | None,
    conversation: Items[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """One conversation as a prompt, written out by the chat template; see `LLM.chat`."""
    if tokenizer is None:
        raise ValueError("chat() needs a tokenizer: skip_tokenizer_init is True")
    check_template_kwargs(chat_template_kwargs or {})
    text = tokenizer.apply_chat_template(
        conversation,
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
        **(chat_template_kwargs or {}),
    )
    check_encodable(text)
    # The template has put a BOS where there should be one.
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return {"prompt": text, "prompt_token_ids": token_ids}


def check_template_kwargs(kwargs: Mapping[str, object]) -> None:
    """Raise unless these may go to a chat template beside what `LLM.chat` gives it.

    Raises:
        TypeError: They are no dict of names.
        ValueError: `LLM.chat` has an argument of its own for one, or decides it.
    """
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise TypeError(f"chat_template_kwargs must be a dict with names, not {kwargs!r:.80}")
    taken = sorted(_TEMPLATE_ARGUMENTS & kwargs.keys())
    if taken:
        raise ValueError(f"chat_template_kwargs can't hold {', '.join(taken)}")


def as_conversation_list(
    messages: Items[Message] | Items[Items[Message]],
) -> list[Items[Message]]:
    """One conversation or many as a list of conversations, whose contents are texts.

    Raises:
        ValueError, TypeError: One is invalid; of several, the text names its index.
    """
    if isinstance(messages, str) or not isinstance(messages, Items):
        raise TypeError(f"messages must be a list of messages, not {type(messages).__name__}")
    if messages and isinstance(messages[0], Mapping):
        conversations = [cast(Items[Message], messages)]
    else:
        conversations = [cast(Items[Message], conversation) for conversation in messages]
    return _of_each(conversations, _as_texts)


def _of_each(
    conversations: list[Items[Message]], function: Callable[[Items[Message]], Result]
) -> list[Result]:
    """`function` of each conversation; of several, what it raises names the index."""
    if len(conversations) == 1:
        return [function(conversations[0])]
    return [naming(f"conversation {i}", function, each) for i, each in enumerate(conversations)]


def _as_texts(conversation: Items[Message]) -> Items[Message]:
    if isinstance(conversation, str) or not isinstance(conversation, Items):
        raise TypeError(f"a conversation must be a list of messages, not {conversation!r}")
    return [_as_text(message) for message in conversation]


def _as_text(message: Message) -> Message:
    """The message with its content as one text: chat templates of text models know no parts."""
    # The template knows which roles exist, but silently drops a message without one.
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"a message must be a dict with role and content, not {message!r}")
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Items):
        return message
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"content part {kind!r} is not supported: only 'text' parts are")
        if not isinstance(part.get("text"), str):
            raise TypeError(f"the text of a content part must be a str, not {part.get('text')!r}")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}
