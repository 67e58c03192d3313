"""Detokenizer: streamed text equals the whole decode, stops are cut exactly, work is linear."""

import json
import os
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from nanovllm.engine.detokenizer import Detokenizer, held_back
from nanovllm.utils.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox, don't you know?",
    "统一码让人人都能用自己的文字。𠜎𠜱𡿺",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb",
    "e\u0301 a\u030a\u0323 नमस्ते ก็ \u1112\u1161\u11ab",
    "def f(x):\n\treturn {'a': x ** 2}  # ok\r\n\n\n",
    "  leading, trailing  and   inner spaces  ",
]
CORPUS = [*TEXTS, "low lower lowest new newer newest wide wider widest " * 20]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def save(backend: tokenizers.Tokenizer, folder: Path, eos_token: str | None = None) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": eos_token} if eos_token else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think>", "<a b>"])
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """A BPE with byte fallback and Llama 2's decoder: ▁ for spaces, <0x..> for unknown bytes."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz,.", "▁a", "th", "▁th", "�"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *byte_tokens, *pieces])}
    merges = [("▁", "a"), ("t", "h"), ("▁", "th")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    pieces = ["<unk>", "▁", "▁the", "▁cat", "s", "▁▁", *"xabth#,é世👍�"]
    model = models.Unigram([(piece, -1.0 - i) for i, piece in enumerate(pieces)], unk_id=0)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return backend


def wordpiece_backend() -> tokenizers.Tokenizer:
    pieces = ["[UNK]", "[SEP]", "play", "##ing", "##s", "do", "n't", "n", "'", "t", ".", ",", "我"]
    backend = tokenizers.Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return backend


def mixed_backend() -> tokenizers.Tokenizer:
    """A decoder of several parts with byte-level inside: known to no special case."""
    backend = byte_level_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


BACKENDS = {
    "byte_level": byte_level_backend,
    "sentencepiece": sentencepiece_backend,
    "metaspace": metaspace_backend,
    "wordpiece": wordpiece_backend,
}


@pytest.fixture(scope="module", params=[*BACKENDS, "qwen3"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    if request.param == "qwen3":
        folder = os.environ.get("NANOVLLM_TOKENIZER")
        if not folder:
            pytest.skip("NANOVLLM_TOKENIZER names no folder with Qwen3's tokenizer")
        return Tokenizer.from_folder(folder)
    return save(BACKENDS[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    return save(byte_level_backend(), tmp_path_factory.mktemp("bytes"), "<|im_end|>")


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    return save(sentencepiece_backend(), tmp_path_factory.mktemp("spm"))


def random_ids(tokenizer: Tokenizer, seed: int, length: int = 40) -> list[int]:
    """Ids from anywhere, the padding behind the vocabulary included; every other run is low ids."""
    rng = random.Random(seed)
    limits = (tokenizer.vocab_size + 5, min(tokenizer.vocab_size, 262))
    return [rng.randrange(limits[rng.random() < 0.5]) for _ in range(length)]


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> tuple[list[str], str | None]:
    """Feed tokens until a stop; return the deltas, the last of them after finish, and the stop."""
    deltas, stop = [], None
    for token_id in token_ids:
        stop = detokenizer.append(token_id)
        deltas.append(detokenizer.take_delta())
        if stop is not None:
            break
    stop = detokenizer.finish() or stop
    return [*deltas, detokenizer.take_delta()], stop


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_joined_deltas_equal_the_decode_of_all_tokens(tokenizer, skip_special_tokens):
    for seed in range(300):
        token_ids = random_ids(tokenizer, seed)
        whole = tokenizer.decode(token_ids, skip_special_tokens)
        for stop in ((), ("never in the text",)):
            detokenizer = Detokenizer(tokenizer, stop, skip_special_tokens=skip_special_tokens)
            deltas, hit = stream(detokenizer, token_ids)
            assert ("".join(deltas), detokenizer.text, hit) == (whole, whole, None), token_ids


def test_text_read_once_at_the_end_equals_the_decode(tokenizer):
    for seed in range(100):
        token_ids = random_ids(tokenizer, seed)
        detokenizer = Detokenizer(tokenizer)
        for token_id in token_ids:
            assert detokenizer.append(token_id) is None
        detokenizer.finish()
        assert detokenizer.text == tokenizer.decode(token_ids)


def test_texts_stream_without_half_characters(tokenizer):
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        whole = tokenizer.decode(token_ids)
        shown = ""
        detokenizer = Detokenizer(tokenizer)
        for token_id in token_ids:
            detokenizer.append(token_id)
            shown += detokenizer.take_delta()
            assert whole.startswith(shown)
            assert detokenizer.text == shown
        detokenizer.finish()
        assert shown + detokenizer.take_delta() == whole


def test_incomplete_tail_shows_as_the_decode_shows_it(byte_level):
    token_ids = byte_level.encode("ok 👍")[:-1]
    detokenizer = Detokenizer(byte_level)
    deltas, _ = stream(detokenizer, token_ids)
    assert "\ufffd" not in "".join(deltas[:-1])
    assert "".join(deltas) == byte_level.decode(token_ids) == "ok \ufffd"


def test_decoder_of_unknown_kind_streams_whole_characters(tmp_path):
    tokenizer = save(mixed_backend(), tmp_path)
    assert not tokenizer.is_byte_level
    for text in TEXTS:
        deltas, _ = stream(Detokenizer(tokenizer), tokenizer.encode(text))
        assert "".join(deltas) == text
        assert all("\ufffd" not in delta for delta in deltas)


class CountingTokenizer(Tokenizer):
    """Counts the tokens it was asked to decode."""

    num_decoded = 0

    def decode(self, token_ids, skip_special_tokens=True):
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)


@pytest.mark.parametrize("name", ["sentencepiece", "metaspace", "wordpiece", "mixed"])
@pytest.mark.parametrize("token_id", [3 + 0x80, 3 + 0xE4, 5, 8])
def test_long_runs_cost_a_constant_number_of_decoded_tokens_each(tmp_path, name, token_id):
    backends = {**BACKENDS, "mixed": mixed_backend}
    save(backends[name](), tmp_path)
    tokenizer = CountingTokenizer.from_folder(tmp_path)
    num_tokens = 2000
    stream(Detokenizer(tokenizer, ["###"]), [token_id] * num_tokens)
    assert tokenizer.num_decoded <= 25 * num_tokens


def test_long_undecodable_run_is_read_once_per_token(byte_level):
    """DecodeStream reads the whole run again at each token: here no byte is read twice."""
    read = []

    class Recorder(dict):
        def __getitem__(self, token_id):
            read.append(token_id)
            return byte_level.byte_table(True)[token_id]

    class Recording(Tokenizer):
        def byte_table(self, skip_special_tokens):
            return Recorder()

    recording = Recording(byte_level._backend, byte_level._folder, byte_level.eos_token_ids)
    continuation_byte = byte_level.encode("é")[-1]
    token_ids = [continuation_byte] * 3000
    deltas, _ = stream(Detokenizer(recording, ["###"]), token_ids)
    assert len(read) == len(token_ids)
    assert "".join(deltas) == byte_level.decode(token_ids)


def test_stop_string_split_over_tokens_is_cut_before(byte_level):
    token_ids = [byte_level.encode(c)[0] for c in "a##b###c"]
    detokenizer = Detokenizer(byte_level, ["###"])
    deltas, stop = stream(detokenizer, token_ids)
    assert (stop, detokenizer.text) == ("###", "a##b")
    assert deltas == ["a", "", "", "##b", "", "", "", ""]


def test_stop_string_may_be_kept(byte_level):
    token_ids = [byte_level.encode(c)[0] for c in "ab###c"]
    detokenizer = Detokenizer(byte_level, ["###"], include_stop_str_in_output=True)
    deltas, stop = stream(detokenizer, token_ids)
    assert (stop, detokenizer.text, "".join(deltas)) == ("###", "ab###", "ab###")


def test_stop_at_the_first_token_leaves_no_text(byte_level):
    detokenizer = Detokenizer(byte_level, ["a"])
    assert detokenizer.append(byte_level.encode("a")[0]) == "a"
    assert (detokenizer.text, detokenizer.take_delta()) == ("", "")


def test_earliest_of_several_stops_wins(tmp_path):
    backend = byte_level_backend()
    backend.add_tokens(["one two three"])
    tokenizer = save(backend, tmp_path)
    token_id = tokenizer.encode("one two three")
    assert len(token_id) == 1
    for stops in (["three", "two"], ["two", "three"], ["three", "o t", "two"]):
        detokenizer = Detokenizer(tokenizer, stops)
        earliest = min(stops, key="one two three".index)
        assert detokenizer.append(token_id[0]) == earliest
        assert detokenizer.text == "one two three"[: "one two three".index(earliest)]


@pytest.mark.parametrize("stop", ["世", "界", "👍", "世界", "é", "e\u0301", "👍🏽"])
def test_stop_inside_and_next_to_multibyte_characters(tokenizer, stop):
    text = "abc 世界👍🏽 é e\u0301 end"
    token_ids = tokenizer.encode(text)
    whole = tokenizer.decode(token_ids)
    detokenizer = Detokenizer(tokenizer, [stop])
    deltas, hit = stream(detokenizer, token_ids)
    if stop in whole:
        assert (hit, detokenizer.text) == (stop, whole[: whole.index(stop)])
    else:
        assert (hit, detokenizer.text) == (None, whole)
    assert "".join(deltas) == detokenizer.text


def test_stops_cut_where_a_search_at_each_token_would(tokenizer):
    """Brute force: after each token, the stop that begins first in the text so far."""
    for seed in range(200):
        rng = random.Random(seed)
        token_ids = tokenizer.encode("".join(rng.choice("ab #th,世é👍") for _ in range(30)))
        whole = tokenizer.decode(token_ids)
        stops = [whole[i : i + rng.randint(1, 3)] for i in rng.sample(range(len(whole)), 3)]
        detokenizer = Detokenizer(tokenizer, stops)
        deltas, hit = stream(detokenizer, token_ids)
        assert hit in stops
        cut = whole[: len(detokenizer.text)]
        assert detokenizer.text == cut == "".join(deltas)
        assert whole[len(cut) :].startswith(hit)
        assert not any(stop in cut for stop in stops)


def test_held_text_is_given_out_when_it_turns_out_harmless(byte_level):
    detokenizer = Detokenizer(byte_level, ["#!"])
    hash_id, a_id = (byte_level.encode(c)[0] for c in "#a")
    detokenizer.append(hash_id)
    assert detokenizer.take_delta() == ""
    detokenizer.append(a_id)
    assert detokenizer.take_delta() == "#a"
    detokenizer.append(hash_id)
    assert detokenizer.finish() is None
    assert detokenizer.take_delta() == "#"


def test_held_back_is_the_longest_beginning_of_a_stop():
    assert held_back("abc", ["cd", "bcx", "zzz"]) == 2
    assert held_back("aaa", ["aaaa"]) == 3
    assert held_back("abc", ["abc"]) == 0
    assert held_back("abc", []) == held_back("", ["a"]) == 0


@pytest.mark.parametrize(("min_tokens", "num_appended"), [(0, 2), (2, 2), (3, 6), (5, 6), (6, 6)])
def test_stops_before_min_tokens_are_passed_over(byte_level, min_tokens, num_appended):
    detokenizer = Detokenizer(byte_level, ["##"], min_tokens=min_tokens)
    token_ids = [byte_level.encode(c)[0] for c in "##ab##"]
    hits = []
    for token_id in token_ids:
        hits.append(detokenizer.append(token_id))
        if hits[-1]:
            break
    assert hits == [None] * (num_appended - 1) + ["##"]
    assert detokenizer.text == ("" if num_appended == 2 else "##ab")


def test_finish_finds_a_stop_in_text_that_waited(sentencepiece):
    byte_ids = [3 + byte for byte in "é".encode()]
    detokenizer = Detokenizer(sentencepiece, ["é"])
    assert [detokenizer.append(i) for i in byte_ids] == [None, None]
    assert detokenizer.finish() == "é"
    assert detokenizer.text == ""


def test_finish_after_a_stop_adds_nothing(byte_level):
    detokenizer = Detokenizer(byte_level, ["b"])
    hits = [detokenizer.append(byte_level.encode(c)[0]) for c in "ab"]
    assert hits == [None, "b"]
    assert detokenizer.finish() is None
    assert detokenizer.finish() is None
    assert (detokenizer.text, detokenizer.take_delta()) == ("a", "a")
