"""A reward model: a language model whose head gives a conversation one number instead of logits.

Shapes: B rows, T tokens, hidden size H.
"""

import torch
from torch import nn


class RewardModel(nn.Module):
    """A model for sequence classification with one label, and its tokenizer.

        score = w . h_last,   h_last the hidden state (H,) of a row's last real token

    Scores have no unit and no zero: only differences between answers to the same question mean something.

    Args:
        model, tokenizer: of Hugging Face; an `AutoModelForSequenceClassification` with `num_labels=1`.
        end_of_turn_ids: every id that ends an assistant turn.
        pad_id: fills the batch; it may equal the id that ends a turn, because the last token is known from the row's
            length. Transformers itself looks for the last id that is not the pad id, and would find the one before.
        compute_dtype: torch.float32, or torch.bfloat16 for autocast.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer,
        end_of_turn_ids: list[int],
        pad_id: int,
        compute_dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.end_of_turn_ids = end_of_turn_ids
        self.pad_id = pad_id
        self.compute_dtype = compute_dtype
        self.gradient_checkpointing = False
        self.compute_device: torch.device | None = None  # unless it is the device of the weights

    @property
    def device(self) -> torch.device:
        return self.compute_device or self.model.device

    def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The score (B,) of each row of `sequences` (B, T), right-padded; `attention_mask` (B, T): 1 on real tokens."""
        self.model.train(self.gradient_checkpointing and torch.is_grad_enabled())  # see Policy.forward
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16):
            if not hasattr(self.model, "score"):  # an encoder, which has its own head on the first token
                return self.model(input_ids=sequences, attention_mask=attention_mask).logits[:, 0].float()
            hidden = self.model.base_model(sequences, use_cache=False).last_hidden_state  # (B, T, H)
        last = hidden[torch.arange(len(sequences)), attention_mask.sum(dim=1) - 1]  # (B, H)
        return last.float() @ self.model.score.weight[0].float()  # not rounded to bfloat16; there is no bias


@torch.no_grad()
def score_rows(model: RewardModel, rows: list[list[int]], batch_size: int) -> list[float]:
    """The scores of rows of ids, in their order; rows of similar length share a batch of at most `batch_size`."""
    scores = [0.0] * len(rows)
    batches: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda index: len(rows[index])):
        # more than a fifth of padding costs more than another pass
        fits = batches and len(batches[-1]) < batch_size and len(rows[index]) <= 1.2 * len(rows[batches[-1][0]])
        batches[-1].append(index) if fits else batches.append([index])
    for part in batches:
        width = max(len(rows[index]) for index in part)
        ids = [rows[index] + [model.pad_id] * (width - len(rows[index])) for index in part]
        mask = [[1] * len(rows[index]) + [0] * (width - len(rows[index])) for index in part]
        found = model(torch.tensor(ids, device=model.device), torch.tensor(mask, device=model.device))
        for index, score in zip(part, found.tolist(), strict=True):
            scores[index] = score
    return scores
