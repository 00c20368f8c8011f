"""Tests run on one thread: two contended threads were measured ten times slower."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

torch.set_num_threads(1)
