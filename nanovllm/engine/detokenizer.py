"""Token ids to text while they are generated, and the search for stop strings in it.

A token is not a piece of text: a character of several bytes may be spread over tokens, and decoding
all tokens anew at each step would cost a quadratic amount of work. A `TextStream` decodes each
token once and gives out whole characters only; a `Detokenizer` adds one request's stop strings and
what may be shown so far. Whatever was given out, joined, is what `Tokenizer.decode` says of all
tokens together.

Why not the DecodeStream of `tokenizers`: it decodes everything since the last complete character
at each token, which is quadratic on long runs of bytes that form none.
"""

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from nanovllm.utils.tokenizer import Tokenizer

MAX_WAITS = 8  # tokens that the rest of a character may take in a decoder of unknown kind


class TextStream(Protocol):
    """Decodes one request's tokens piece by piece; the pieces joined are the text of them all."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Take more tokens and return the text that no later token can change."""

    def flush(self) -> str:
        """Return what is left: an incomplete character, as the tokenizer shows it."""


def text_stream(tokenizer: Tokenizer, skip_special_tokens: bool) -> TextStream:
    """Return the stream that fits the tokenizer's kind."""
    kind = ByteStream if tokenizer.is_byte_level else WindowStream
    return kind(tokenizer, skip_special_tokens)


class ByteStream:
    """For byte-level tokenizers: the text is the tokens' bytes, read as UTF-8 as they come."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._bytes_of = tokenizer.byte_table(skip_special_tokens).__getitem__
        # Broken bytes become U+FFFD by the same rule (maximal subparts) as in `tokenizers`.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowStream:
    """For all other tokenizers: decode the new tokens behind the last one that gave text.

    In these a token's text depends on whether it is the first (a leading space is dropped), so a
    window of earlier tokens goes in front and its own text is cut off again. Tokens wait in two
    cases. With byte fallback (SentencePiece) a run of byte tokens is decoded when it has ended,
    since one broken byte turns the whole run into U+FFFD. With anything else, tokens whose text
    ends in U+FFFD wait for a few more.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []  # tokens whose text is out
        self._window_length = 0  # characters of the window's own text
        self._waiting: list[int] = []  # tokens whose text isn't
        self._num_waits = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        visible = [token_id for token_id in token_ids if self._is_visible(token_id)]
        self._waiting += visible
        if not visible or self._in_byte_run(visible[-1]):
            return ""
        text = self._new_text()
        if text.endswith("\ufffd") and self._num_waits < MAX_WAITS:
            self._num_waits += 1
            return ""
        self._move_window()
        return text

    def flush(self) -> str:
        return self._new_text() if self._waiting else ""

    def _is_visible(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.id_to_token(token_id) is not None

    def _in_byte_run(self, token_id: int) -> bool:
        token = self._tokenizer.id_to_token(token_id)
        return self._tokenizer.has_byte_fallback and token is not None and is_byte_token(token)

    def _new_text(self) -> str:
        return self._decode(self._window + self._waiting)[self._window_length :]

    def _move_window(self) -> None:
        """Keep the fewest last tokens with text: after textless ones the next may seem first."""
        seen = self._window + self._waiting
        for length in range(1, len(seen) + 1):
            self._window = seen[-length:]
            self._window_length = len(self._decode(self._window))
            if self._window_length:
                break
        self._waiting.clear()
        self._num_waits = 0

    def _decode(self, token_ids: list[int]) -> str:
        # Skipped tokens never get here, so nothing else may be left out.
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def is_byte_token(token: str) -> bool:
    """Whether a SentencePiece token such as <0xE4> stands for one byte."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


class Detokenizer:
    """One sample's text as it grows.

    `append` each token that belongs to the text (not the eos or stop id that ended it), then
    `finish`. Without stop strings tokens are only collected until somebody asks for text, so a
    request that is read at its end is decoded once.

    Invariant: `text` never ends in half a character, never holds a stop string (or, with
    include_stop_str_in_output, ends with the one that stopped it), and only ever grows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Start an empty text.

        Args:
            tokenizer: The model's.
            stop: Strings that end it; see SamplingParams.
            include_stop_str_in_output: Cut behind the stop string, not before it.
            skip_special_tokens: Leave special tokens out.
            min_tokens: No stop string is looked for in the text of fewer tokens than this.
        """
        self._stream = text_stream(tokenizer, skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._unread: list[int] = []  # tokens not given to the stream yet
        self._parts: list[str] = []  # text that is settled
        self._num_taken = 0  # parts that take_delta has returned
        self._held = ""  # text that may turn out to be the beginning of a stop string
        self._is_closed = False

    def append(self, token_id: int) -> str | None:
        """Take one token; return the stop string that it completes, if any.

        The text is cut at the stop string that begins first (of two that begin together, the one
        listed first). After a stop no more tokens may come.
        """
        assert not self._is_closed, "a token after the end of a text"
        self._num_tokens += 1
        self._unread.append(token_id)
        return self._read() if self._stop else None

    def finish(self) -> str | None:
        """End the text: give out what was held back, and an incomplete character's stand-in.

        Returns a stop string that only this last piece of text completes, if any.
        """
        if self._is_closed:
            return None
        stop = self._read() or self._settle(self._stream.flush())
        self._close(self._held)
        return stop

    def take_delta(self) -> str:
        """Return the text that is new since the last call and can no longer change."""
        self._read()
        delta = "".join(self._parts[self._num_taken :])
        self._num_taken = len(self._parts)
        return delta

    @property
    def text(self) -> str:
        """All text that can no longer change; the whole text after `finish`."""
        self._read()
        return "".join(self._parts)

    def _read(self) -> str | None:
        if not self._unread:
            return None
        new_text = self._stream.decode(self._unread)
        self._unread.clear()
        return self._settle(new_text)

    def _settle(self, new_text: str) -> str | None:
        """Add text, look for a stop string that ends in it, and hold back what may begin one."""
        text = self._held + new_text
        if self._num_tokens >= self._min_tokens and new_text:
            hit = self._find_stop(text, len(self._held))
            if hit is not None:
                end = hit.start + len(hit.stop) if self._include_stop else hit.start
                self._close(text[:end])
                return hit.stop
        num_held = held_back(text, self._stop)
        self._parts.append(text[: len(text) - num_held])
        self._held = text[len(text) - num_held :]
        return None

    def _find_stop(self, text: str, num_old: int) -> "_Hit | None":
        """Return the first stop string in `text` that ends after its first `num_old` characters."""
        hits = (_Hit(text.find(s, max(0, num_old - len(s) + 1)), s) for s in self._stop)
        return min((hit for hit in hits if hit.start >= 0), key=lambda hit: hit.start, default=None)

    def _close(self, last_text: str) -> None:
        self._parts.append(last_text)
        self._held = ""
        self._is_closed = True


class _Hit(NamedTuple):
    start: int  # place in the text
    stop: str


def held_back(text: str, stop: Sequence[str]) -> int:
    """Return how many characters at the end of `text` could be the beginning of a stop string."""
    return max((_overlap(text, string) for string in stop), default=0)


def _overlap(text: str, string: str) -> int:
    longest = min(len(string) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
