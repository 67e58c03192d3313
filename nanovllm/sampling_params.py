"""One request's wishes: how its tokens are drawn, when it stops and what is reported about it.

Names, meanings and ranges are those of vLLM's `SamplingParams`. A value is checked completely when
it is made and never changes afterwards, so one object may serve many prompts; `replace` makes a
changed copy. What only the engine knows (vocabulary size, max_model_len) is checked when a request
is added.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real

GREEDY_TEMPERATURE = 1e-5  # below this a temperature means argmax, as in vLLM
MAX_SEED = 2**63 - 1
MAX_MIN_TOKENS = 2**31 - 1
MAX_TEMPERATURE = 1e30  # its reciprocal is a float32 too
MAX_N = 16384  # samples of one prompt; vLLM's limit


@dataclass(frozen=True, slots=True, init=False)
class SamplingParams:
    """How one request is sampled; frozen, hashable and valid by construction."""

    temperature: float  # >= 0; logits are divided by it; below 1e-5 = greedy
    max_tokens: int | None  # >= 1, cut to what max_model_len leaves; None = all that fit
    ignore_eos: bool  # run past eos ids; stop_token_ids still stop
    top_p: float  # (0, 1]: smallest set of likeliest tokens whose probability reaches it; 1 = off
    top_k: int  # >= 1: the k likeliest tokens; 0 or -1 = off
    min_p: float  # [0, 1]: tokens at least this likely relative to the likeliest; 0 = off
    n: int  # 1..16384 samples of one prompt
    seed: int | None  # 0..2**63-1: the draws depend on it alone; None = derived from the LLM's seed
    stop: tuple[str, ...]  # text is cut before the earliest of these
    stop_token_ids: tuple[int, ...]  # >= 0; these end a request, also under ignore_eos
    min_tokens: int  # 0..2**31 - 1: neither eos, stop ids nor stop strings end a request before it
    logprobs: int | None  # likeliest tokens reported beside the sampled one; -1 = all; None = off
    prompt_logprobs: int | None  # the same for each prompt token
    presence_penalty: float  # [-2, 2]: taken once from tokens already generated; 0 = off
    frequency_penalty: float  # [-2, 2]: taken for each time a token was generated; 0 = off
    repetition_penalty: float  # > 0: divides the logits of tokens in prompt or output; 1 = off
    logit_bias: tuple[tuple[int, float], ...]  # (token id, amount added to its logit), by token id
    bad_words: tuple[str, ...]  # texts whose last token is forbidden after their first ones
    skip_special_tokens: bool  # leave special tokens out of the text
    include_stop_str_in_output: bool  # keep the stop string that ended the text
    detokenize: bool  # False: outputs carry token ids and an empty text

    def __init__(
        self,
        temperature: float = 1.0,
        max_tokens: int | None = 64,
        ignore_eos: bool = False,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        n: int = 1,
        seed: int | None = None,
        stop: str | Iterable[str] | None = None,
        stop_token_ids: Iterable[int] | None = None,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None,
        bad_words: Iterable[str] | None = None,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        detokenize: bool = True,
    ) -> None:
        """Check and normalise every field (numpy scalars become Python's, lists become tuples).

        Long because it is a table: one line a field, its kind and its limits.

        Raises:
            TypeError: a value of the wrong kind, such as a bool or a string for a number.
            ValueError: a value out of range, or two fields that contradict each other.
        """
        values: dict[str, object] = {
            "temperature": _real("temperature", temperature, low=0.0, high=MAX_TEMPERATURE),
            "max_tokens": _optional_int("max_tokens", max_tokens, low=1),
            "ignore_eos": _bool("ignore_eos", ignore_eos),
            "top_p": _real("top_p", top_p, above=0.0, high=1.0),
            "top_k": _int("top_k", top_k, low=-1),
            "min_p": _real("min_p", min_p, low=0.0, high=1.0),
            "n": _int("n", n, low=1, high=MAX_N),
            "seed": _optional_int("seed", seed, low=0, high=MAX_SEED),
            "stop": _texts("stop", (stop,) if isinstance(stop, str) else stop),
            "stop_token_ids": _token_ids("stop_token_ids", stop_token_ids),
            "min_tokens": _int("min_tokens", min_tokens, low=0, high=MAX_MIN_TOKENS),
            "logprobs": _optional_int("logprobs", logprobs, low=-1),
            "prompt_logprobs": _optional_int("prompt_logprobs", prompt_logprobs, low=-1),
            "presence_penalty": _real("presence_penalty", presence_penalty, low=-2.0, high=2.0),
            "frequency_penalty": _real("frequency_penalty", frequency_penalty, low=-2.0, high=2.0),
            "repetition_penalty": _real("repetition_penalty", repetition_penalty, above=0.0),
            "logit_bias": _biases("logit_bias", logit_bias),
            "bad_words": _texts("bad_words", bad_words),
            "skip_special_tokens": _bool("skip_special_tokens", skip_special_tokens),
            "include_stop_str_in_output": _bool(
                "include_stop_str_in_output", include_stop_str_in_output
            ),
            "detokenize": _bool("detokenize", detokenize),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_together()

    def replace(self, **changes: object) -> "SamplingParams":
        """Return a copy with some fields changed, checked as a new one is.

        Raises:
            TypeError: an unknown field name, or a value of the wrong kind.
            ValueError: as the constructor.
        """
        return replace(self, **changes)  # type: ignore[arg-type]  # the constructor checks each value

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the argmax, so that filters have nothing left to choose."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_filters(self) -> bool:
        """Whether top_k, top_p or min_p may take tokens out of a draw."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens seen so far."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def changes_draw(self) -> bool:
        """Whether logits are changed before the draw, so that the plain sampler's isn't enough.

        min_tokens=1 forbids nothing: a first token may always be the last.
        """
        return (
            self.has_filters
            or self.has_penalties
            or bool(self.logit_bias or self.bad_words)
            or self.min_tokens > 1
        )

    @property
    def is_special(self) -> bool:
        """Whether a rank must know more of a row than temperature and seed."""
        return self.changes_draw or self.logprobs is not None or self.prompt_logprobs is not None

    def _check_together(self) -> None:
        if self.n > 1 and self.is_greedy:
            raise ValueError(
                f"n is {self.n} with temperature {self.temperature}: greedy samples would all be "
                "equal; use n=1 or a temperature above 0"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}: "
                "lower min_tokens or raise max_tokens"
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop is {list(self.stop)} with detokenize=False: stop strings are searched in "
                "the text; use stop_token_ids or detokenize=True"
            )


def _wrong_kind(name: str, value: object, expected: str) -> TypeError:
    return TypeError(f"{name} must be {expected}, got {value!r} ({type(value).__name__})")


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong_kind(name, value, "True or False")
    return value


def _int(name: str, value: object, *, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong_kind(name, value, "an int")
    number = int(value)
    if number < low or (high is not None and number > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {limit}, got {number}")
    return number


def _optional_int(name: str, value: object, *, low: int, high: int | None = None) -> int | None:
    return None if value is None else _int(name, value, low=low, high=high)


def _real(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
) -> float:
    """Return `value` as a finite float in [low, high] and strictly greater than `above`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong_kind(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:  # an int beyond all floats
        number = math.inf
    if not math.isfinite(number) or number < low or number <= above or number > high:
        limits = [
            f"at least {low:g}" if low > -math.inf else "",
            f"greater than {above:g}" if above > -math.inf else "",
            f"at most {high:g}" if high < math.inf else "",
        ]
        raise ValueError(f"{name} must be {_all_of(limits)}, got {number}")
    return number


def _all_of(limits: list[str]) -> str:
    return " and ".join(["finite", *filter(None, limits)])


def _texts(name: str, values: Iterable[str] | None) -> tuple[str, ...]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise _wrong_kind(name, values, "a list of strings")
    texts = tuple(values)
    for text in texts:
        if not isinstance(text, str):
            raise _wrong_kind(f"each of {name}", text, "a string")
        if not text:
            raise ValueError(f"{name} holds an empty string, which every text contains: drop it")
    return texts


def _token_ids(name: str, values: Iterable[int] | None) -> tuple[int, ...]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise _wrong_kind(name, values, "a list of token ids")
    return tuple(_int(f"each of {name}", value, low=0) for value in values)


def _biases(
    name: str, values: Mapping[int, float] | Iterable[tuple[int, float]] | None
) -> tuple[tuple[int, float], ...]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise _wrong_kind(name, values, "a dict of token id to bias")
    pairs = values.items() if isinstance(values, Mapping) else values
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise _wrong_kind(f"each of {name}", pair, "a (token id, bias) pair")
        token_id = _int(f"each token id of {name}", pair[0], low=0)
        biases[token_id] = _real(f"{name}[{token_id}]", pair[1])
    return tuple(sorted(biases.items()))
