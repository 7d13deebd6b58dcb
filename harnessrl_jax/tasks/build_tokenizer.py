"""Facts, questions and the words of the harness -> `assets/quickstart/tokenizer.json`, a byte-level BPE.

Run `python -m harnessrl_jax.tasks.build_tokenizer`; the output is the same for the same `tokenizers` version.

The split into words is made for copying: a name is the same token sequence wherever it stands, in a passage, a question
or a JSON string. A space goes to the punctuation or the lower-case word beside it, never to the capital word after it,
so `: Lima`, `is Lima` and `"Lima` all hold the token `Lima`; inside a name, ` Aires` keeps its space everywhere.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from harnessrl_jax.tasks.facts import BORDER, RELATIONS, load_facts
from harnessrl_jax.tasks.grammar import parse_question
from harnessrl_jax.tasks.invented import invented_facts, invented_tasks
from harnessrl_jax.tasks.prompts import PROMPTS
from harnessrl_jax.tasks.questions import train_tasks

FOLDER = Path(__file__).parent.parent / "assets" / "quickstart"
VOCABULARY = 2048
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
)
"""Control tokens; the id of each is its place here."""
WORDS = "|".join(
    (
        r"\p{N}",  # one digit
        r" ?\p{Lu}\p{L}*(?:['-]\p{L}+)*",  # a capital word; its space only after another word of the name
        r" ?\p{Ll}\p{L}*(?:['-]\p{L}+)*(?: (?!and ))?",  # a lower-case word with its spaces; ` and ` has its own
        r"[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)* ?",  # punctuation, as in `": {"`, with the space after it
        r"\n",
        r"\s",
        r"\p{L}+",  # scripts without case
    )
)


def corpus() -> Iterator[str]:
    """The texts to learn from, repeated so that the fixed words cost one token and real names few."""
    fixed = [agent["system"] for agent in PROMPTS["agents"].values()]
    keys = ("question", "query", "text")
    for name, tool in PROMPTS["tools"].items():
        fixed += [f"{name}({', '.join(keys)}): {tool['function']['description']}"]
        fixed += [f'{{"name": "{name}", "arguments": {{"{key}": "' for key in keys]
    fixed += [*PROMPTS["replies"].values(), '"}}', "system\n", "user\n", "assistant\n", "tool\n"]
    labels = [relation.label for field, relation in RELATIONS.items() if field != BORDER]
    fixed += [f"What is the {label} of the country whose {label} is\n{label} of\n, {label}: Z" for label in labels]
    fixed += ["What is the country with the longest border with the country\n, longest border: Z"]
    fixed += ["What are the Z and the Z?"]
    for _ in range(3000):
        yield from fixed
    facts = load_facts()
    for _ in range(6):
        yield from (fact.text for fact in facts)
    yield from (step for task in train_tasks(100) if (plan := parse_question(task.question)) for step in plan.steps)
    world = invented_facts(0, 300)
    yield from (fact.text for fact in world)
    yield from (task.question for task in invented_tasks(0, world, 20))


def build() -> Tokenizer:
    """Trains the tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def main() -> None:
    """Writes the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER / "tokenizer.json")
    output = parser.parse_args().output
    tokenizer = build()
    data = json.loads(tokenizer.to_str())
    output.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{output}: {tokenizer.get_vocab_size()} tokens, {output.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
