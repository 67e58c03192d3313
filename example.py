"""Answer a few prompts.

python example.py                  the bundled model: sums, reversals and look-ups
python example.py MODEL_FOLDER     a Qwen3 checkpoint, through its chat template
"""

import argparse
import sys
from pathlib import Path

from nanovllm import LLM, SamplingParams

TINY_QWEN3 = Path(__file__).resolve().parent / "tests" / "tiny_qwen3"
QUESTIONS = (
    "Introduce yourself in one sentence.",
    "List all prime numbers within 100.",
    "Why is the sky blue?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="folder or hub id; default: the bundled model")
    arguments = parser.parse_args()
    if arguments.model is None:
        answer_checkable_problems()
    else:
        answer_questions(arguments.model)


def answer_checkable_problems() -> None:
    """Ask the bundled model problems that it never saw in training, and count right answers."""
    sys.path.insert(0, str(TINY_QWEN3.parent))
    from tiny_qwen3.problems import TASKS, held_out_problems

    problems = [p for task in TASKS for p in held_out_problems(task, count=4, seed=2024)]
    conversations = [[{"role": "user", "content": problem.prompt}] for problem in problems]
    with LLM(str(TINY_QWEN3)) as llm:
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=16))
    num_right = 0
    for problem, output in zip(problems, outputs, strict=True):
        answer = output.outputs[0].text
        num_right += answer == problem.answer
        print(f"\nPrompt ({len(output.prompt_token_ids)} tokens): {shortened(problem.prompt)}")
        print(f"Answer: {answer}\nRight answer: {problem.answer}")
    print(f"\n{num_right} of {len(problems)} right")


def answer_questions(model: str) -> None:
    """Ask any chat model some general questions."""
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM(model) as llm:
        outputs = llm.chat(
            conversations,
            SamplingParams(temperature=0.6, max_tokens=256),
            chat_template_kwargs={"enable_thinking": False},  # which would take more tokens
        )
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"\nPrompt: {question}\nAnswer: {output.outputs[0].text}")


def shortened(prompt: str) -> str:
    """The prompt on one line, the middle of a long list left out."""
    line = prompt.replace("\n", " | ")
    return line if len(line) <= 80 else f"{line[:36]} ... {line[-36:]}"


if __name__ == "__main__":
    main()
