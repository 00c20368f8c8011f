"""Write gsm8k_easy.jsonl and gsm8k_easy_heldout.jsonl: the easiest questions of GSM8K's published training file.

    python imitation/tiny_policy/make_gsm8k_easy.py gsm8k/train.jsonl

A question is easy if it has at most 120 characters and its published solution computes at most two numbers (it has one
or two `<<...>>`). The training file has 301 of them. The first 205 are for training, and the other 96 are held out;
GSM8K's test file is not touched. Rows are unchanged.

GSM8K: Cobbe et al. 2021, arXiv 2110.14168, https://github.com/openai/grade-school-math, Copyright (c) 2021 OpenAI, MIT
License: gsm8k_easy.LICENSE.
"""

import json
import sys
from pathlib import Path

from data_files import DATA

NUM_TRAIN = 205


def easy_rows(lines: list[str]) -> list[str]:
    """The lines of the published file that hold an easy question.

    >>> easy = '{"question": "What is 2 + 3?", "answer": "2+3=<<2+3=5>>5\\\\n#### 5"}'
    >>> easy_rows([easy, easy.replace("3=", "3=<<4>>, 3=<<6>>, ")]) == [easy]
    True
    """
    rows = [(line, json.loads(line)) for line in lines]
    return [line for line, row in rows if len(row["question"]) <= 120 and row["answer"].count("<<") in (1, 2)]


if __name__ == "__main__":
    found = easy_rows(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())
    for name, part in (("gsm8k_easy", found[:NUM_TRAIN]), ("gsm8k_easy_heldout", found[NUM_TRAIN:])):
        (DATA / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in part), encoding="utf-8")
