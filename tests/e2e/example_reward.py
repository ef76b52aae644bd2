"""Reinforcement learning with a reward function of one's own.

python example_reward.py MODEL OUT     # MODEL: a folder, a run directory, a hub id; OUT: the run directory to write
"""

import sys

from posttrain import Message, RLRun, Task, train


def closeness(task: Task, text: str) -> float:
    """1 for the right number after '####', less the further away it is, 0 for anything else."""
    digits = text.removeprefix("####").strip()
    return 1 / (1 + abs(int(digits) - int(task.answer))) if digits.isdecimal() and len(digits) < 6 else 0.0


if __name__ == "__main__":
    question = "Compute {} + {}. Give the final integer after '####'."
    tasks = [Task(f"{a}+{b}", (Message("user", question.format(a, b)),), str(a + b)) for a in range(8) for b in range(8)]
    loop = {"steps": 10, "prompts": 4, "siblings": 4, "optim": {"lr": 1e-4}}
    settings = RLRun.load({"model": sys.argv[1], "sampling": {"max_tokens": 8}, "rl": loop})
    train(settings, sys.argv[2], tasks=tasks, reward=closeness)
