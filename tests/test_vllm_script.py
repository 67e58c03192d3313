"""Scripts written for other engines run here once their import is changed, and nothing else.

Each script is a text, as its author would have it in a file; the test swaps the module's name and
runs it.
"""

from pathlib import Path

import pytest
from conftest import MakeCheckpoint
from word_tokenizer import write_word_tokenizer

import nanovllm

VOCAB, EOS, BOS = 200, 199, 198

VLLM_GENERATE = """
from vllm import LLM, SamplingParams

prompts = ["t5 t6 t7", "t1", "t9 t8 t7 t6 t5"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16)
llm = LLM(model=MODEL, max_model_len=128, enforce_eager=True, gpu_memory_utilization=0.5, seed=1)

outputs = llm.generate(prompts, sampling_params)
for prompt, output in zip(prompts, outputs):
    assert output.prompt == prompt
    assert isinstance(output.outputs[0].text, str)
    assert output.outputs[0].finish_reason in ("stop", "length")

# Keywords, one prompt, none at all, defaults.
assert len(llm.generate(prompts=prompts, sampling_params=sampling_params, use_tqdm=False)) == 3
(single,) = llm.generate("t5 t6", sampling_params, use_tqdm=False)
assert single.finished and single.request_id
assert llm.generate([], sampling_params) == []
(default,) = llm.generate("t5 t6", use_tqdm=False)

# Token ids and dict prompts; params for each prompt.
by_ids, by_text = llm.generate(
    [{"prompt_token_ids": [198, 5, 6, 7]}, {"prompt": "t5 t6 t7"}],
    [SamplingParams(temperature=0, max_tokens=4), SamplingParams(temperature=0, max_tokens=4)],
    use_tqdm=False,
)
assert by_ids.prompt_token_ids == by_text.prompt_token_ids == [198, 5, 6, 7]
assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids
assert by_ids.prompt is None and by_text.prompt == "t5 t6 t7"

# Several samples, seeds, logprobs.
params = SamplingParams(n=4, temperature=1.0, seed=42, max_tokens=8, logprobs=5, prompt_logprobs=2)
(output,) = llm.generate(["t3 t4 t5"], params, use_tqdm=False)
assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
for sample in output.outputs:
    assert len(sample.logprobs) == len(sample.token_ids)
    for token_id, position in zip(sample.token_ids, sample.logprobs):
        assert 5 <= len(position) <= 6
        assert position[token_id].logprob <= 0 and position[token_id].rank >= 1
        assert isinstance(position[token_id].decoded_token, str)
    total = sum(p[t].logprob for t, p in zip(sample.token_ids, sample.logprobs))
    assert abs(total - sample.cumulative_logprob) < 1e-3
assert output.prompt_logprobs[0] is None
assert all(len(position) in (2, 3) for position in output.prompt_logprobs[1:])
(again,) = llm.generate(["t3 t4 t5"], params, use_tqdm=False)
assert [s.token_ids for s in again.outputs] == [s.token_ids for s in output.outputs]

# Stopping.
greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
(free,) = llm.generate("t20 t21", greedy, use_tqdm=False)
assert free.outputs[0].finish_reason == "length" and free.outputs[0].stop_reason is None
word, token_id = free.outputs[0].text.split()[3], free.outputs[0].token_ids[3]
(stopped,) = llm.generate(
    "t20 t21",
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=[word + " "]),
    use_tqdm=False,
)
assert stopped.outputs[0].finish_reason == "stop"
assert stopped.outputs[0].stop_reason == word + " "
assert word + " " not in stopped.outputs[0].text
(by_id,) = llm.generate(
    "t20 t21",
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[token_id]),
    use_tqdm=False,
)
assert by_id.outputs[0].stop_reason == token_id and by_id.outputs[0].token_ids[-1] == token_id

# The other knobs of a request.
llm.generate(
    prompts,
    SamplingParams(
        temperature=0.9, top_k=20, min_p=0.02, presence_penalty=0.3, frequency_penalty=0.2,
        repetition_penalty=1.1, min_tokens=2, max_tokens=8, bad_words=["t7"],
        logit_bias={3: 2.0}, skip_special_tokens=False, include_stop_str_in_output=True, stop="t4",
    ),
    use_tqdm=False,
)
recommended = llm.get_default_sampling_params()
assert recommended.temperature == 0.7 and recommended.top_k == 20 and recommended.top_p == 0.8
assert llm.get_tokenizer().decode([5, 6]) == "t5 t6"
assert llm.reset_prefix_cache() in (None, True)
metrics = output.metrics
"""

VLLM_CHAT = """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, max_model_len=256)
sampling_params = SamplingParams(temperature=0.5, max_tokens=6, seed=3)
conversation = [
    {"role": "system", "content": "t10 t11"},
    {"role": "user", "content": "t12"},
    {"role": "assistant", "content": "t13"},
    {"role": "user", "content": "t14 t15"},
]
(output,) = llm.chat(conversation, sampling_params=sampling_params, use_tqdm=False)
assert output.prompt_token_ids == [198, 10, 11, 12, 13, 14, 15, 1]  # one BOS, the template's
assert output.outputs[0].token_ids

outputs = llm.chat([conversation, conversation[:2]], sampling_params, use_tqdm=False)
assert len(outputs) == 2
assert outputs[0].outputs[0].token_ids == output.outputs[0].token_ids

(quiet,) = llm.chat(
    conversation[:2], sampling_params, chat_template_kwargs={"enable_thinking": False}
)
assert quiet.prompt_token_ids == [198, 10, 11, 12, 1, 2, 3]

(continued,) = llm.chat(
    conversation[:3],
    sampling_params,
    use_tqdm=False,
    add_generation_prompt=False,
    continue_final_message=True,
)
assert continued.prompt_token_ids == [198, 10, 11, 12, 13]

(output,) = llm.chat(
    conversation, SamplingParams(n=4, temperature=1.0, max_tokens=5, logprobs=5), use_tqdm=False
)
assert len(output.outputs) == 4
"""

NANO_VLLM = """
from nanovllm import LLM, SamplingParams

llm = LLM(MODEL, enforce_eager=True, tensor_parallel_size=1)
sampling_params = SamplingParams(temperature=0.6, max_tokens=16)
prompts = ["t5 t6 t7", "t8"]
outputs = llm.generate(prompts, sampling_params)
for prompt, output in zip(prompts, outputs):
    assert isinstance(output["text"], str)
    assert isinstance(output["token_ids"], list)
    assert set(output) == {"text", "token_ids"}

token_ids = [[1, 2, 3], [4, 5]]
params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in (3, 7)]
outputs = llm.generate(token_ids, params, use_tqdm=False)
assert [len(output["token_ids"]) for output in outputs] == [3, 7]
llm.exit()
"""


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with tokenizer, chat template and recommendations, as people have them."""
    source = make_checkpoint(vocab_size=VOCAB, eos_token_id=EOS)
    folder = tmp_path_factory.mktemp("model")
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    write_word_tokenizer(folder, VOCAB, eos=EOS, bos=BOS)
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [199, 197], "temperature": 0.7, "top_k": 20, "top_p": 0.8}',
        encoding="utf-8",
    )
    return folder


@pytest.mark.parametrize(
    "script", [VLLM_GENERATE, VLLM_CHAT, NANO_VLLM], ids=["generate", "chat", "nano-vllm"]
)
def test_script_runs_with_only_the_import_changed(script, folder):
    names: dict[str, object] = {"MODEL": str(folder)}
    exec(script.replace("from vllm import", "from nanovllm import"), names)
    llm = names["llm"]
    assert isinstance(llm, nanovllm.LLM)
    llm.exit()
