"""The policy: a language model with everything that sampling and training must agree on.

Shapes: B rows, T tokens, N action tokens, hidden size H; entry `[:, t]` of a (B, T-1) tensor is about token t+1.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from common.logprobs import MAX_LOGITS, log_probs_and_entropy, score_logits
from fast.packed_rows import hidden_states as hidden_states_of_packed_rows
from fast.packed_rows import use_segments


class PolicyOutput(NamedTuple):
    log_probs: torch.Tensor  # (B, T-1) nats, with gradient; 0 where the mask is 0
    entropy: torch.Tensor  # (B, T-1) nats, of softmax(logits / temperature), before top-p; no gradient


class Policy(nn.Module):
    """A causal language model with its tokenizer, temperature, end-of-turn and padding ids.

    Log-probabilities are computed inside `forward`, so that a wrapper around this module (DDP, FSDP) sees the call and
    synchronises its gradients; calling `policy.model` in training would skip that, without an error.

    Args:
        model, tokenizer: of Hugging Face; a causal language model.
        end_of_turn_ids: every id that ends an assistant turn; some models have several.
        pad_id: fills the batch; it may equal an end-of-turn id, because no mask is ever made from ids.
        temperature: of the sampling distribution; log-probabilities are computed from logits / temperature.
        compute_dtype: torch.float32, or torch.bfloat16 for autocast. Trained weights are in float32 either way: a step
            of 1e-6 would be rounded away in a bfloat16 weight, and training would silently do nothing.

    Rows are packed where the model's attention allows it (`packing` names the attention; None: rows are padded). Either
    way `forward` calls the decoder once: with sharded weights each call is a message that all ranks must send.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer,
        end_of_turn_ids: list[int],
        pad_id: int,
        temperature: float = 1.0,
        compute_dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
    ):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.end_of_turn_ids = end_of_turn_ids
        self.stop_texts: tuple[str, ...] = ()  # end a turn, too: --stop
        self.pad_id = pad_id
        self.temperature = temperature
        self.compute_dtype = compute_dtype
        self.gradient_checkpointing = gradient_checkpointing
        self.packing = use_segments(model)
        self.max_logits = MAX_LOGITS
        self.score = score_logits  # unless each rank computes only some of the logits, see scale/mesh
        self.compute_device: torch.device | None = None  # unless it is the device of the weights: they can be offloaded

    def take_over(self, policy: "Policy") -> None:
        """Wrap the model of another policy, instead of `__init__`, with all that was decided when that was loaded.

        To decide again would forget that the rows of this model are padded, for example.
        """
        nn.Module.__init__(self)
        vars(self).update(vars(policy) | vars(self))
        self.model = policy.model

    @property
    def device(self) -> torch.device:
        return self.compute_device or self.model.device

    @property
    def trained(self) -> nn.Module:
        """The module that holds the (possibly sharded) weights; for a reference it can be another policy."""
        return self

    def autocast(self) -> torch.autocast:
        """The arithmetic of every forward pass, in sampling and in training alike."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16)

    def inference(self) -> torch.inference_mode | torch.no_grad:
        """Without gradients: PyTorch's inference mode, but not with autocast: there it casts all weights each time."""
        return torch.no_grad() if self.compute_dtype == torch.bfloat16 else torch.inference_mode()

    def forward(self, sequences: torch.Tensor, action_mask: torch.Tensor) -> PolicyOutput:
        """Log-probs and entropy of the tokens of `sequences` where `action_mask` is 1.

        Args:
            sequences: (B, T), right-padded. No attention mask is needed: attention is causal, so no real token ever
                sees the padding after it, whatever the padding's id.
            action_mask: (B, T-1), 1 where token t+1 counts.
        """
        # Gradient checkpointing works only in training mode, and sampling with a cache only outside it.
        self.model.train(self.gradient_checkpointing and torch.is_grad_enabled())
        with self.autocast():
            hidden, positions = self._hidden_states(sequences, action_mask)  # (N, H), (N,)
            targets = sequences[:, 1:].flatten()[positions]  # (N,)
            head = self.model.get_output_embeddings()
            settings = (self.temperature, self.max_logits, self.score)
            values = log_probs_and_entropy(hidden, targets, head, *settings)  # (N,), (N,)
        zeros, width = torch.zeros(action_mask.shape, device=sequences.device), action_mask.shape[1]
        return PolicyOutput(*(zeros.index_put((positions // width, positions % width), x) for x in values))

    def next_logits(self, step: Callable[..., torch.Tensor] | None = None, **inputs) -> torch.Tensor:
        """The logits (rows, V) that predict the token after the last one, by `step` (`decoding_step`) or the model."""
        if step is not None:
            return step(**inputs)
        return self.model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]

    def _hidden_states(
        self, sequences: torch.Tensor, action_mask: torch.Tensor, decoder: nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states (N, H) that predict action tokens, and their positions in the flattened (B, T-1).

        Of the model's own decoder, unless another one is given.
        """
        decoder = self.model.get_decoder() if decoder is None else decoder
        if self.packing and action_mask.any():
            return hidden_states_of_packed_rows(decoder, sequences, action_mask, self.packing)
        hidden = decoder(sequences, use_cache=False).last_hidden_state  # (B, T, H)
        positions = action_mask.flatten().nonzero()[:, 0]
        return hidden[:, :-1].flatten(0, 1)[positions], positions
