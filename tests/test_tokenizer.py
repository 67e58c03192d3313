"""Tokenizer: the ids and text of the Hugging Face tokenizer, without importing transformers."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from nanovllm.utils.model_folder import eos_token_ids, read_json
from nanovllm.utils.tokenizer import Tokenizer, bytes_of_spelling

TEXTS = [
    "The quick brown fox, don't you know?",
    "统一码让人人都能用自己的文字。𠜎𠜱𡿺",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb",
    "e\u0301 a\u030a\u0323 नमस्ते ก็ \u1112\u1161\u11ab",
    "def f(x):\n\treturn {'a': x ** 2}  # ok\r\n\n\n",
    "<bos>said<think>twice <a b></s> ",
    "",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def backend(bos: bool = True) -> tokenizers.Tokenizer:
    """One token a byte, four named tokens, and a BOS that the post-processor adds."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>"), AddedToken("</s>")])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("<a b>")])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 256)]
        )
    return tokenizer


def write(folder: Path, tokenizer: tokenizers.Tokenizer | None = None, **config: object) -> Path:
    (tokenizer or backend()).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def huggingface(folder: Path):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"eos_token": "</s>", "add_bos_token": True},
        {"eos_token": "</s>", "add_bos_token": False},
        {"eos_token": "</s>", "add_eos_token": True},
        {"eos_token": {"content": "</s>", "__type": "AddedToken"}, "add_bos_token": True},
        {"eos_token": "<new>", "pad_token": "<think>"},
        {"additional_special_tokens": ["<think>"]},
        {"additional_special_tokens": ["<new>"]},
        {"split_special_tokens": True},
        {"bos_token": None, "add_bos_token": True},
    ],
)
def test_ids_and_text_equal_those_of_transformers(tmp_path, config):
    tokenizer, reference = (
        Tokenizer.from_folder(write(tmp_path, **config)),
        huggingface(tmp_path),
    )
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        assert token_ids == reference.encode(text)
        without = tokenizer.encode(text, add_special_tokens=False)
        assert without == reference.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert tokenizer.decode(token_ids, skip) == reference.decode(
                token_ids, skip_special_tokens=skip
            )
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    eos = reference.eos_token_id
    assert tokenizer.eos_token_ids == (set() if eos is None else {eos})


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    trimmed = backend()
    trimmed.enable_truncation(4)
    trimmed.enable_padding(length=12)
    tokenizer = Tokenizer.from_folder(write(tmp_path, trimmed))
    assert len(tokenizer.encode("abcdefgh")) == 9
    assert len(tokenizer.encode("a")) == 2


def test_chat_template_gets_its_arguments_and_no_second_bos(tmp_path):
    tokenizer = Tokenizer.from_folder(write(tmp_path, chat_template=TEMPLATE))
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages)
    assert text == "<bos>[user]hi</s>[assistant]"
    assert tokenizer.encode(text, add_special_tokens=False).count(256) == 1
    assert tokenizer.apply_chat_template(messages, enable_thinking=False).endswith(
        "<think></think>"
    )
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False).endswith("</s>")
    messages.append({"role": "assistant", "content": "well"})
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text.endswith("well")


def test_missing_chat_template_is_a_value_error(tmp_path):
    tokenizer = Tokenizer.from_folder(write(tmp_path))
    with pytest.raises(ValueError, match="chat_template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_get_tokenizer_is_the_hugging_face_one(tmp_path):
    tokenizer = Tokenizer.from_folder(write(tmp_path))
    reference = tokenizer.get_tokenizer()
    assert reference is tokenizer.get_tokenizer()
    assert reference.encode("hi") == tokenizer.encode("hi")


def test_loading_imports_no_transformers(tmp_path):
    write(tmp_path)
    program = (
        "import sys; from nanovllm.utils.tokenizer import Tokenizer\n"
        f"t = Tokenizer.from_folder({str(tmp_path)!r}); t.decode(t.encode('hi'))\n"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_folder_without_tokenizer_json_is_converted(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[UNK]", "[SEP]", "[CLS]", "play", "##ing"]))
    config = {"tokenizer_class": "BertTokenizer", "unk_token": "[UNK]", "sep_token": "[SEP]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    reference = huggingface(tmp_path)
    assert tokenizer.encode("playing") == reference.encode("playing")
    assert tokenizer.decode(tokenizer.encode("playing")) == "playing"


def test_folders_that_hold_no_tokenizer_are_value_errors(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"expected tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("not json")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(tmp_path)


def test_code_in_the_folder_is_never_run(tmp_path):
    write(tmp_path, auto_map={"AutoTokenizer": ["custom.Custom", "custom.Custom"]})
    (tmp_path / "custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    tokenizer = Tokenizer.from_folder(tmp_path)
    tokenizer.get_tokenizer()
    assert not (tmp_path / "ran").exists()


def test_eos_token_id_is_an_id_or_a_list_and_an_error_names_its_file():
    assert eos_token_ids("config.json", {"eos_token_id": 0}) == (0,)
    assert eos_token_ids("config.json", {"eos_token_id": [151645, 151643]}) == (151645, 151643)
    assert eos_token_ids("config.json", {"eos_token_id": None}) == eos_token_ids("", {}) == ()
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id .*</s>"):
        eos_token_ids("generation_config.json", {"eos_token_id": "</s>"})
    for value in ([1, True], [1, -1], 1.5):
        with pytest.raises(ValueError, match=r"config\.json: eos_token_id"):
            eos_token_ids("config.json", {"eos_token_id": value})


def test_bytes_joined_are_the_text_of_byte_level_tokens(tmp_path):
    tokenizer = Tokenizer.from_folder(write(tmp_path, eos_token="</s>"))
    assert tokenizer.is_byte_level
    assert not tokenizer.has_byte_fallback
    for skip in (True, False):
        table = tokenizer.byte_table(skip)
        for seed in range(300):
            rng = random.Random(seed)
            token_ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(20)]
            joined = b"".join(table[token_id] for token_id in token_ids)
            assert joined.decode("utf-8", "replace") == tokenizer.decode(token_ids, skip)


def test_spelling_outside_the_byte_alphabet_is_its_own_utf8():
    assert bytes_of_spelling("Ġa") == b" a"
    assert bytes_of_spelling("<a b>") == b"<a b>"
    assert bytes_of_spelling("ä½ł") == "你".encode()
    assert bytes_of_spelling("你") == "你".encode()


def test_bad_words_are_forbidden_at_the_start_and_after_a_space(tmp_path):
    merged = tokenizers.Tokenizer(
        models.BPE(
            {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġa": 4, "Ġab": 5},
            [("Ġ", "a"), ("Ġa", "b"), ("a", "b")],
        )
    )
    merged.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    merged.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.from_folder(write(tmp_path, merged))
    assert tokenizer.encode_bad_words(["ab"]) == ((3,), (5,))
    assert tokenizer.encode_bad_words([" ab", "ba"]) == ((3,), (5,), (1, 0))
    with pytest.raises(ValueError, match="no tokens"):
        tokenizer.encode_bad_words(["  "])


def test_special_tokens_and_spellings(tmp_path):
    tokenizer = Tokenizer.from_folder(write(tmp_path, eos_token="<think>"))
    assert tokenizer.special_token_ids == {256, 257, 258}
    assert tokenizer.id_to_token(257) == "</s>"
    assert tokenizer.id_to_token(10_000) is None
    assert tokenizer.decode_token(257) == "</s>"
    assert tokenizer.vocab_size == 260


def test_read_json_of_no_file_is_empty(tmp_path):
    assert read_json(tmp_path / "none.json") == {}
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="JSON object"):
        read_json(tmp_path / "list.json")


def test_qwen3_equals_transformers():
    folder = os.environ.get("NANOVLLM_TOKENIZER")
    if not folder:
        pytest.skip("NANOVLLM_TOKENIZER names no folder with Qwen3's tokenizer")
    tokenizer = Tokenizer.from_folder(folder)
    reference = huggingface(Path(folder))
    assert tokenizer.eos_token_ids == {reference.eos_token_id} == {151645}
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>"]:
        token_ids = tokenizer.encode(text)
        assert token_ids == reference.encode(text)
        assert tokenizer.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, enable_thinking=False)
    assert text.endswith("<think>\n\n</think>\n\n")
