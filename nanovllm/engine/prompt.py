"""A prompt in any of the forms that callers have it in, read as text or as token ids."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from nanovllm.utils.tokenizer import check_encodable

Prompt = str | Items[int] | np.ndarray | Mapping[str, object]


class ParsedPrompt(NamedTuple):
    """A prompt in one of its two forms; text may accompany token ids for the record."""

    text: str | None
    token_ids: list[int] | None


def parse_prompt(prompt: Prompt, vocab_size: int) -> ParsedPrompt:
    """Read a text, token ids, or vLLM's dict of either.

    Raises:
        TypeError: It is none of these.
        ValueError: It is empty, or a token id is outside the vocabulary.
    """
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt, vocab_size)
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("the prompt is empty: it needs at least one token")
        check_encodable(prompt)
        return ParsedPrompt(prompt, None)
    return ParsedPrompt(None, parse_token_ids(prompt, vocab_size))


def parse_token_ids(token_ids: Items[int] | np.ndarray, vocab_size: int) -> list[int]:
    """Check token ids and return them as a list of ints; see `parse_prompt`."""
    if not isinstance(token_ids, Items | np.ndarray):
        raise TypeError(f"a prompt is a str, token ids or a dict, not {type(token_ids).__name__}")
    if len(token_ids) == 0:
        raise ValueError("the prompt is empty: it needs at least one token")
    array = _int_array(token_ids)
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"token id {bad} is outside the vocabulary: 0..{vocab_size - 1}")
    return array.tolist()


def _int_array(token_ids: Items[int] | np.ndarray) -> np.ndarray:
    """Token ids as a flat array of ints, Python's if one is too large for numpy's."""
    if isinstance(token_ids, str | bytes | bytearray | memoryview):
        kind = type(token_ids).__name__
        raise TypeError(f"token ids must be a flat list of ints, not a {kind}")
    try:
        array = np.asarray(token_ids)
    except ValueError as error:  # lists of different lengths
        raise TypeError(f"token ids must be a flat list of ints: {error}") from error
    if array.ndim == 1 and array.dtype.kind in "iu":
        return array
    if array.ndim == 1 and all(type(token_id) is int for token_id in token_ids):
        return np.asarray(token_ids, dtype=object)
    kinds = sorted({type(token_id).__name__ for token_id in token_ids})
    raise TypeError(f"token ids must be a flat list of ints, not of {', '.join(kinds)}")


def _parse_mapping(prompt: Mapping[str, object], vocab_size: int) -> ParsedPrompt:
    unknown = set(prompt) - {"prompt", "prompt_token_ids"}
    if unknown:
        raise ValueError(
            f"prompt keys {sorted(unknown)} are not supported: use 'prompt' or 'prompt_token_ids'"
        )
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"'prompt' must be a str, not {type(text).__name__}")
    if token_ids is not None:
        return ParsedPrompt(text, parse_token_ids(token_ids, vocab_size))  # type: ignore[arg-type]
    if text is None:
        raise ValueError("a dict prompt needs 'prompt' or 'prompt_token_ids'")
    return parse_prompt(text, vocab_size)
