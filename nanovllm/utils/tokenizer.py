"""Text to token ids and back, from the files of a model's folder alone.

Start-up is part of the contract: `tokenizer.json` is read by the `tokenizers` library and the
configuration beside it as JSON. transformers is imported only for chat templates, for
`get_tokenizer()` and for folders without a `tokenizer.json`. Nothing in the folder is executed:
remote code is never trusted, and templates run in transformers' sandbox.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from nanovllm.utils.model_folder import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """One model's tokenizer: the same ids and text as the Hugging Face tokenizer of its folder."""

    def __init__(self, backend: Backend, folder: Path, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids  # of the tokenizer alone; the model's files may add some
        self._backend = backend
        self._folder = folder

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Load the tokenizer of a local model folder.

        Raises:
            ValueError: no folder there, no tokenizer in it, or one of its files isn't readable.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"tokenizer folder {str(folder)!r} does not exist")
        config = read_tokenizer_config(folder)
        path = folder / "tokenizer.json"
        backend = _load_backend(path) if path.is_file() else _convert_backend(folder)
        _adjust_backend(backend, config)
        eos_token = _token_content(config.get("eos_token"))
        eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
        return cls(backend, folder, frozenset(() if eos_token_id is None else (eos_token_id,)))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, with a BOS exactly where the model's tokenizer adds one.

        A chat template writes its own BOS: encode what it returns with add_special_tokens=False.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of many texts, encoded in parallel."""
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids without a token (a padded vocabulary's) have none."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """Return one token's text on its own; bytes of a broken character show as U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    def encode_bad_words(self, bad_words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences to forbid: each word at a text's start and after a space.

        The spaced form counts only where it is as long and starts with another token, as in vLLM.
        """
        sequences: list[tuple[int, ...]] = []
        for word in bad_words:
            check_encodable(word, "a word of bad_words")
            plain, spaced = (
                tuple(self.encode(prefix + word.lstrip(), add_special_tokens=False))
                for prefix in ("", " ")
            )
            if not plain:
                raise ValueError(f"bad_words holds {word!r}, which has no tokens: drop it")
            sequences.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                sequences.append(spaced)
        return tuple(sequences)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> str:
        """Return one conversation as the model's chat template writes it, special tokens included.

        `kwargs` reach the template (Qwen3's `enable_thinking`). Encode the result with
        add_special_tokens=False: the template has put a BOS where there should be one.

        Raises:
            ValueError: the folder has no chat template, it can't write these messages, or the two
                flags contradict each other.
        """
        # Callable: a template takes any keyword, which the method's own signature can't say.
        render: Callable[..., object] = self.get_tokenizer().apply_chat_template
        try:
            text = render(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise ValueError(f"the chat template can't write these messages: {error}") from error
        assert isinstance(text, str), "one conversation renders to one text"
        return text

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the Hugging Face tokenizer of the folder, loaded on the first call."""
        return self._huggingface

    @cached_property
    def _huggingface(self) -> "PreTrainedTokenizerBase":
        return _load_huggingface(self._folder)

    @property
    def vocab_size(self) -> int:
        """Tokens that exist, added ones included; a model's own vocab_size may be padded."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of a token, or None where there is none."""
        return self._backend.id_to_token(token_id)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that skip_special_tokens leaves out of a text."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether a text is nothing but its tokens' bytes, read as UTF-8 (GPT-2, Llama 3, Qwen)."""
        return self._decoder_types == ["ByteLevel"]

    @cached_property
    def has_byte_fallback(self) -> bool:
        """Whether tokens spelled <0xE4> stand for single bytes (SentencePiece models)."""
        return "ByteFallback" in self._decoder_types

    def byte_table(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Return the bytes of each token id, for byte-level tokenizers; skipped ones are empty."""
        return self._byte_tables[skip_special_tokens]

    @cached_property
    def _byte_tables(self) -> dict[bool, Mapping[int, bytes]]:
        return {True: ByteTable(self, self.special_token_ids), False: ByteTable(self, frozenset())}

    @cached_property
    def _decoder_types(self) -> list[str]:
        decoder = self._backend.decoder
        if decoder is None:
            return []
        state = json.loads(decoder.__getstate__())
        return [part["type"] for part in state.get("decoders", [state])]


class ByteTable(dict[int, bytes]):
    """Token id to bytes, filled as ids are first met: start-up doesn't read a whole vocabulary."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        self[token_id] = token_bytes = b"" if token is None else bytes_of_spelling(token)
        return token_bytes


def bytes_of_spelling(token: str) -> bytes:
    """Return the bytes that a byte-level vocabulary's spelling stands for.

    A token with a character outside the alphabet (an added token with a space) is its own UTF-8.

    Source: GPT-2's byte-to-unicode table, as the ByteLevel decoder of `tokenizers` reads it.
    """
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Printable Latin-1 characters spell themselves, the other bytes the characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


def read_tokenizer_config(folder: Path) -> dict[str, object]:
    """Return tokenizer_config.json over the older special_tokens_map.json."""
    return read_json(folder / "special_tokens_map.json") | read_json(
        folder / "tokenizer_config.json"
    )


def _load_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception for every bad file
        raise ValueError(f"{path} is no tokenizer that `tokenizers` can read: {error}") from error


def _convert_backend(folder: Path) -> Backend:
    backend = getattr(_load_huggingface(folder), "backend_tokenizer", None)  # slow ones have none
    if not isinstance(backend, Backend):
        raise ValueError(
            f"{folder} holds a tokenizer without a fast form: save one as tokenizer.json there"
        )
    if not backend.encode("text").ids:
        # What transformers 5 makes of a folder with a config.json and no tokenizer at all.
        raise ValueError(
            f"{folder} holds no tokenizer: pass tokenizer=<another folder>, or "
            "skip_tokenizer_init=True for token ids only"
        )
    return backend


def _load_huggingface(folder: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]
    except Exception as error:  # of a file with wrong types transformers raises any kind
        raise ValueError(
            f"no tokenizer could be loaded from {folder}: expected tokenizer.json and "
            "tokenizer_config.json; pass tokenizer=<another folder>, or skip_tokenizer_init=True "
            f"for token ids only ({error})"
        ) from error


def _adjust_backend(backend: Backend, config: Mapping[str, object]) -> None:
    """Apply what tokenizer_config.json changes in tokenizer.json, as transformers does on load.

    add_bos_token isn't among it: the post-processor in tokenizer.json says whether there is one.
    """
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    added = backend.get_added_tokens_decoder().values()
    is_special = {token.content: token.special for token in added}
    named = [_token_content(config.get(name)) for name in NAMED_SPECIAL_TOKENS]
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    others = map(_token_content, extra) if isinstance(extra, list) else ()
    # A named token becomes special; of the others, those that the file has stay as they are there.
    missing = [name for name in named if name and not is_special.get(name)]
    missing += [name for name in others if name and name not in is_special]
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in missing]
    )


def _token_content(token: object) -> str | None:
    """Return a special token's text from either of its JSON forms, a string or an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def check_encodable(text: str, name: str = "the prompt") -> None:
    """Raise unless `text` has a UTF-8 form: one with half a surrogate pair has none.

    Raises:
        ValueError: With `name`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is no valid Unicode text: {error}") from error
