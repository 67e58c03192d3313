"""A tokenizer with one word a token id, so that a test can say in text which tokens it means."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} t1{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %} t2 t3{% endif %}"
)


def write_word_tokenizer(folder: Path, num_words: int, *, eos: int, bos: int | None = None) -> Path:
    """Write a tokenizer of the words t0, t1, ... to `folder`; `bos` begins every encoded text."""
    vocab = {f"t{token_id}": token_id for token_id in range(num_words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [f"t{token_id}" for token_id in (eos, bos) if token_id is not None]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"t{eos}"}
    config["chat_template"] = CHAT_TEMPLATE
    if bos is not None:
        config["bos_token"] = f"t{bos}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"t{bos} $A", special_tokens=[(f"t{bos}", bos)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def words(token_ids: Sequence[int]) -> str:
    """The text that encodes to these ids."""
    return " ".join(f"t{token_id}" for token_id in token_ids)
