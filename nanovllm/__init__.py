"""Offline batch inference for large language models, written to be read.

    from nanovllm import LLM, SamplingParams

    with LLM("path/to/Qwen3-0.6B") as llm:
        outputs = llm.generate(["Hello"], SamplingParams(temperature=0.6, max_tokens=64))
        print(outputs[0].outputs[0].text)
"""

from nanovllm.llm import LLM
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]
