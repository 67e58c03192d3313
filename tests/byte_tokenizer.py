"""A tokenizer with one byte a token id, and an eos behind them: any text is a known list of ids."""

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nanovllm.utils.tokenizer import BYTE_OF_CHARACTER

VOCAB_SIZE = 264  # 256 bytes, the eos, and ids without a token, as padded vocabularies have
EOS = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def copy_with_tokenizer(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint to `folder` and give it this tokenizer."""
    return write_byte_tokenizer(Path(shutil.copytree(checkpoint, folder)))


def write_byte_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json to `folder`."""
    tokenizer = Tokenizer(models.BPE(dict(BYTE_OF_CHARACTER), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    assert tokenizer.token_to_id("<eos>") == EOS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "chat_template": CHAT_TEMPLATE,
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
