"""Small tokenizers, made in a test: byte-level BPE of a few lines, with or without a template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LINES = ["hello world, what is this", "user assistant system", "one two three four five six"]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TURN = "{{'<|im_start|>' + m['role'] + '\\n'}}"
ASKS = "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
ANSWER = "{{m['content'] + '<|im_end|>'}}"
PLAIN = f"{{% for m in messages %}}{TURN}{ANSWER}{{{{'\\n'}}}}{{% endfor %}}{ASKS}"
"""A template that does not mark answers, as most do not."""
MARKED = (
    f"{{% for m in messages %}}{TURN}{{% if m['role'] == 'assistant' %}}"
    f"{{% generation %}}{ANSWER}{{% endgeneration %}}{{% else %}}{ANSWER}{{% endif %}}"
    f"{{{{'\\n'}}}}{{% endfor %}}{ASKS}"
)
"""The same conversations, with `{% generation %}` around answers."""
LAST_DIFFERS = (
    f"{{% for m in messages %}}{TURN}{{% if loop.last %}}{{{{'(last) '}}}}{{% endif %}}{ANSWER}"
    f"{{{{'\\n'}}}}{{% endfor %}}{ASKS}"
)
"""A template that shows the last turn in another way than earlier ones."""


def make_tokenizer(
    folder: Path, template: str | None = PLAIN, *, starts: bool = False, size: int = 300
) -> str:
    """Write the files of a tokenizer, and return the folder.

    Args:
        folder: the folder, which is made.
        template: the chat template.
        starts: whether every text begins with `<s>`.
        size: tokens, at most.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        LINES * 3,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=SPECIAL,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    if starts:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def loaded(folder: str) -> Any:
    """The tokenizer of a folder, as transformers has it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def chat(*turns: str) -> dict[str, Any]:
    """A conversation: the user begins, or the system with `system: ...`."""
    roles = ("user", "assistant")
    found: list[dict[str, str]] = []
    for number, turn in enumerate(turns):
        found.append({"role": roles[number % 2], "content": turn})
    return {"messages": found}
