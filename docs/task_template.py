"""Your own task: copy this file, change it, and train on it. docs/your_task.md explains it.

python experiment_base/train.py --task my_task.py --data my_rows.jsonl
"""

# TRAIN_DATA, EVAL_DATA = "train.jsonl", "held_out.jsonl"  # optional: the defaults of --data and --eval-data
FIELDS = {"question": str, "answer": str}  # optional: the fields that every row must have
SYSTEM_PROMPT = "End with the final answer inside <answer> and </answer>."  # optional; the bundled policy gets none
REWARD_WEIGHTS = {"correct": 1.0, "short": 0.1}  # for each component; with weight 0 it is only logged


def messages(row: dict, system_prompt: str) -> list[dict]:
    """The conversation that asks the question of a row."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": row["question"]}]


def reward(row: dict, text: str) -> dict[str, float]:
    """The components of a completion's reward, for any text. The mean of `correct` is logged as accuracy."""
    answer, end, rest = text.partition("<answer>")[2].partition("</answer>")
    is_correct = bool(end) and "<answer>" not in rest and answer.strip() == row["answer"].strip() != ""
    return {"correct": float(is_correct), "short": float(len(text) <= 60)}


def describe(row: dict, text: str) -> dict[str, float]:
    """Optional: other values to log for a completion."""
    return {"thinks": float("<think>" in text), "answers_directly": float("<think>" not in text)}


def solution(row: dict) -> str:
    """Optional: a completion that earns `correct` = 1. It reveals rows that nobody can answer."""
    return f"<answer>{row['answer']}</answer>"
