"""Self-consistency and a small tree of thoughts, and what the shared prefixes saved.

    python examples/branching.py [--model MODEL]

Both searches ask the model many times for continuations of texts that begin alike. The engine computes each beginning
once; the table at the end compares the prompt tokens that were sent with those that had to be computed.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from caudex.engine.branch import Branch, generate_branches
from caudex.engine.config import EngineConfig
from caudex.engine.engine import Engine
from caudex.engine.types import Completion, SamplingParams

EXAMPLES = """\
Q: A box holds 3 red and 4 blue balls. How many balls are there? A: 3 + 4 = 7. The answer is 7.
Q: Ann reads 5 pages a day. How many pages does she read in 6 days? A: 5 * 6 = 30. The answer is 30.
Q: Tom had 12 apples and gave 5 away. How many are left? A: 12 - 5 = 7. The answer is 7.
"""
QUESTION = "Q: A farmer has 4 cows and buys 3 more. Each gives 2 buckets of milk. How many buckets? A:"
STORY = "Write a short story about a lighthouse keeper who finds a message in a bottle."


@dataclass
class Saving:
    """Prompt tokens sent, and those of them that were found in the cache."""

    sent: int = 0
    cached: int = 0

    def count(self, completions: list[Completion]) -> None:
        self.sent += sum(completion.num_prompt_tokens for completion in completions)
        self.cached += sum(completion.num_cached_tokens for completion in completions)


def self_consistency(engine: Engine, num_samples: int, saving: Saving) -> str:
    """Sample several chains of thought and take the answer that most of them reach (Wang et al., 2022)."""
    prompt = engine.tokenizer.encode(EXAMPLES + QUESTION)
    branches = [Branch(engine, prompt) for _ in range(num_samples)]
    sampling = SamplingParams(temperature=0.8, max_tokens=48, stop=("\n",))
    completions = generate_branches(branches, sampling)
    saving.count(completions)
    answers = Counter(completion.text.rpartition("The answer is ")[2].strip(" .") for completion in completions)
    return answers.most_common(1)[0][0]


def tree_of_thoughts(engine: Engine, depth: int, width: int, keep: int, saving: Saving) -> Branch:
    """Grow every kept branch in several ways, keep what the model finds likeliest, and go on (Yao et al., 2023)."""
    kept = [Branch(engine, engine.tokenizer.render_chat([{"role": "user", "content": STORY}]))]
    sampling = SamplingParams(temperature=0.9, max_tokens=24, logprobs=0, ignore_eos=True)
    for _ in range(depth):
        grown = [branch.fork() for branch in kept for _ in range(width)]
        saving.count(generate_branches(grown, sampling))
        kept = sorted(grown, key=lambda branch: branch.logprob, reverse=True)[:keep]
    return kept[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face directory or hub id, or a .gguf file; SmolLM2-135M by default")
    options = parser.parse_args()
    console = Console()
    table = Table("search", "prompt tokens", "computed", "saved")
    with Engine.load(EngineConfig(model=options.model)) as engine:
        sampled, grown = Saving(), Saving()
        console.print("[bold]Self-consistency[/]: the answer is", self_consistency(engine, 8, sampled))
        best = tree_of_thoughts(engine, depth=4, width=3, keep=2, saving=grown)
        console.print("[bold]Tree of thoughts[/]:", best.text.rpartition("assistant\n")[2])
    for name, saving in (("self-consistency, 8 samples", sampled), ("tree, 4 levels of 2 x 3", grown)):
        share = saving.cached / saving.sent
        table.add_row(name, str(saving.sent), str(saving.sent - saving.cached), f"{share:.0%}")
    console.print(table)


if __name__ == "__main__":
    main()
