"""Adapters, quantised weights and gradient checkpointing: log-probs and gradients equal a plain model's."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from policies import fill_adapters, load, log_probs_of, plain_log_probs, random_rows, read_plain
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from common.critic import ActorCritic
from common.policy import Policy
from common.sampling import sample

import harness.models.loading
from harness.base.config import RESOLVED, TINY_POLICY
from harness.cli.parse import parse_config
from harness.models.adapters import add_adapter
from harness.models.loading import load_policy, make_reference
from harness.models.pretrained import count_parameters
from harness.teachers.teachers import load_teacher

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13]]
A_RUN = (
    *("--steps", "2", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "16", "--eval-prompts", "4"),
    *("--checkpoint-every", "0", "--eval-every", "0", "--name", "adapter"),
)


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """The gradients of the mean negative log-prob, by the name of the weight."""
    policy.zero_grad()
    sequences, mask = random_rows(policy.model.config.vocab_size)
    (-policy(sequences, mask).log_probs.sum() / mask.sum()).backward()
    return {name: weight.grad.clone() for name, weight in policy.named_parameters() if weight.requires_grad}


def cosine(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The cosine between two sets of gradients, each concatenated."""
    assert a.keys() == b.keys()
    flat = [torch.cat([grads[name].flatten().double() for name in a]) for grads in (a, b)]
    return torch.nn.functional.cosine_similarity(*flat, dim=0).item()


def run_and_catch(script, *flags: str) -> Policy:
    """Run main(), and return the policy that it trained."""
    caught = []

    def load_and_catch(*arguments):
        caught.append(load_policy(*arguments))
        return caught[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "load_policy", load_and_catch)
        script.main([*A_RUN, *flags])
    return caught[0]


@pytest.fixture(scope="module")
def trained(load_script, tmp_path_factory) -> SimpleNamespace:
    """Two steps of experiment_base with an adapter on the bundled policy: the policy, and the run's directory."""
    runs = tmp_path_factory.mktemp("runs")
    script = load_script("experiment_base/train.py")
    policy = run_and_catch(script, "--runs-dir", str(runs), "--lora-rank", "4", "--lr", "1e-2", "--save-merged")
    return SimpleNamespace(policy=policy, directory=runs / "experiment_base" / "adapter")


# LoRA ---------------------------------------------------------------------------------------------------------------


def test_training_changes_all_adapters_and_never_the_base(trained):
    """The base stays the same bit for bit."""
    start = dict(load(lora_rank=4).named_parameters())
    moved = {name for name, weight in trained.policy.named_parameters() if not torch.equal(weight, start[name])}
    assert moved == {name for name in start if "lora_" in name}
    base = trained.policy.model.get_base_model().state_dict()
    stored = load_file(TINY_POLICY / "model.safetensors")
    assert len(stored) > 30
    for name, weight in stored.items():
        now = base.get(name.replace(".weight", ".base_layer.weight"), base.get(name))
        assert torch.equal(now, weight.float()), name


def test_the_reference_of_an_adapter_is_the_unchanged_model():
    """Also after training, without additional memory; scoring with it leaves the adapter on."""
    policy = load(lora_rank=4)
    reference = make_reference(policy)
    before = log_probs_of(fill_adapters(policy))
    assert torch.equal(log_probs_of(reference), log_probs_of(load()))
    torch.testing.assert_close(log_probs_of(reference), plain_log_probs(read_plain(TINY_POLICY)), atol=1e-5, rtol=0)
    assert torch.equal(log_probs_of(policy), before)
    assert (log_probs_of(reference) - before).abs().max() > 0.01
    assert {id(weight) for weight in reference.parameters()} == {id(weight) for weight in policy.parameters()}


SAME_MODEL = {"critic": (ActorCritic, 0), "reference": (make_reference, 0), "without adapter": (make_reference, 4)}


@pytest.mark.parametrize("kind", SAME_MODEL)
def test_what_was_decided_for_a_policy_holds_for_what_is_made_of_it(kind):
    """Every attribute: packing, which --no-pack switches off, arithmetic, scoring, ids, and those to come."""
    make, rank = SAME_MODEL[kind]
    policy = load(lora_rank=rank, pack=False)
    assert policy.packing is None
    decided = vars(policy).keys() - vars(torch.nn.Module()).keys()
    assert decided >= {"packing", "score", "max_logits", "temperature", "compute_dtype", "pad_id"}
    for name in decided - {"compute_device"}:
        setattr(policy, name, f"{name} as decided")
    policy.compute_device = torch.device("cpu", 0)
    made = make(policy)
    assert {name: vars(made)[name] for name in decided} == {name: vars(policy)[name] for name in decided}


def test_a_teacher_is_padded_with_no_pack_too(load_script, monkeypatch):
    monkeypatch.setattr("harness.teachers.teachers.check_context", lambda *_: None)
    config_class = load_script("imitation/distill/train.py").Config
    for pack, expected in ((True, "sdpa"), (False, None)):
        config = config_class(pack=pack, device="cpu", dtype="float32", attn_implementation="sdpa", micro_batch_size=4)
        assert load_teacher(config, None, load()).args[0].packing == expected


def test_training_mode_changes_no_log_prob(trained, monkeypatch):
    """It would, with dropout in the model or in its adapter."""
    policy = trained.policy
    monkeypatch.setattr(policy, "gradient_checkpointing", True)  # this enters training mode
    with_gradient = policy(*random_rows(policy.model.config.vocab_size)).log_probs
    assert policy.model.training
    assert torch.equal(with_gradient.detach(), log_probs_of(policy))
    assert not policy.model.training


def test_peft_loads_the_saved_adapter(trained):
    loaded = PeftModel.from_pretrained(read_plain(TINY_POLICY), trained.directory / "final")
    expected = log_probs_of(trained.policy)
    torch.testing.assert_close(log_probs_of(Policy(loaded, None, [2], 0)), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(plain_log_probs(loaded), expected, atol=1e-5, rtol=0)


def test_the_merged_model_agrees_with_the_adapter(trained):
    """It is a plain model, which loads without peft."""
    path = trained.directory / "final_merged"
    assert not (path / "adapter_config.json").exists()
    torch.testing.assert_close(plain_log_probs(read_plain(path)), log_probs_of(trained.policy), atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(path).chat_template == trained.policy.tokenizer.chat_template


def test_adapters_start_from_the_seed_alone():
    torch.manual_seed(1)
    first = load(lora_rank=4, seed=5).state_dict()
    torch.manual_seed(2)
    again, other = load(lora_rank=4, seed=5).state_dict(), load(lora_rank=4, seed=6).state_dict()
    random = [name for name in first if "lora_A" in name]
    assert random
    for name in random:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize(("settings", "scale"), [({}, 2.0), ({"lora_alpha": 12.0}, 3.0), ({"lora_alpha": 1.0}, 0.25)])
def test_an_adapter_adds_alpha_over_rank_times_b_a_x(settings, scale):
    policy = fill_adapters(load(lora_rank=4, **settings))
    layer = next(module for module in policy.modules() if isinstance(module, LoraLayer))
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.shape[0] == 4
    torch.testing.assert_close(layer(x), layer.get_base_layer()(x) + scale * x @ a.T @ b.T)


def test_the_default_lr_is_ten_times_as_high_with_an_adapter(load_script, save_checkpoint, tmp_path):
    """An explicit learning rate stays as it is."""
    config_class = load_script("experiment_base/train.py").Config
    save_checkpoint("llama", tmp_path / "model")

    def rate(*flags: str) -> float:
        return parse_config(config_class, flags, description="").lr

    for kind, model in (("tiny", "tiny"), ("full", str(tmp_path / "model"))):
        assert rate("--model", model) == RESOLVED[kind]["lr"]
        assert rate("--model", model, "--lora-rank", "8") == pytest.approx(10 * RESOLVED[kind]["lr"])
        assert rate("--model", model, "--lora-rank", "8", "--lr", "3e-5") == 3e-5


def test_only_frozen_weights_are_held_in_bfloat16(save_checkpoint, tmp_path):
    path = save_checkpoint("qwen2", tmp_path / "model")
    for settings, frozen in (({"lora_rank": 2}, torch.bfloat16), ({}, None)):
        policy = load(path, dtype="bfloat16", **settings)
        for name, weight in policy.named_parameters():
            assert weight.requires_grad == (not settings or "lora_" in name), name
            assert weight.dtype == (torch.float32 if weight.requires_grad else frozen), name
    assert {weight.dtype for weight in load(path, lora_rank=2).parameters()} == {torch.float32}


# attention and gradient checkpointing -------------------------------------------------------------------------------


@pytest.fixture
def widths(monkeypatch) -> list[int]:
    """The number of tokens per row in every call of a Llama layer, in order.

    Counted in the MLP: replacing a layer's own `forward` would end its checkpointing.
    """
    calls, real = [], LlamaMLP.forward

    def forward(self, x):
        calls.append(x.shape[1])
        return real(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    return calls


WAYS = {"all weights": {}, "adapter": {"lora_rank": 4}, "adapter on 4 bits": {"lora_rank": 4, "load_in": "4bit"}}


@pytest.mark.parametrize("way", ["all weights", pytest.param("adapter", marks=pytest.mark.slow), "adapter on 4 bits"])
def test_gradient_checkpointing_gives_the_same_gradients(widths, way):
    """It computes every layer twice."""
    if "load_in" in WAYS[way]:
        pytest.importorskip("bitsandbytes")
    plain = fill_adapters(load(**WAYS[way]))
    checkpointing = fill_adapters(load(gradient_checkpointing=True, **WAYS[way]))
    widths.clear()
    expected = gradients(plain)
    assert len(widths) == 4
    widths.clear()
    found = gradients(checkpointing)
    assert len(widths) == 8
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=0)


def test_gradient_checkpointing_changes_no_sample(widths):
    """The cache stays on while sampling."""
    rows = {}
    for checkpointing in (False, True):
        policy = load(gradient_checkpointing=checkpointing)
        gradients(policy)  # enters training mode, where checkpointing would switch off the cache
        widths.clear()
        rows[checkpointing] = sample(policy, PROMPTS, 3, max_new_tokens=8, key=(0,))
        if checkpointing:
            assert set(widths[4:]) == {1}  # after the prompts one token at a time
            assert len(widths) == 4 * 8
        else:
            assert len(widths) == 4  # the prompts; then `decoding_step`, which checkpointing's hook excludes
    assert rows[True] == rows[False]


# quantised weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_rollout_does_not_change_gradients_over_4_bit_weights(monkeypatch, dtype):
    """On CPUs with AVX512-BF16 bitsandbytes repacks the weights in the first forward pass without gradient."""
    pytest.importorskip("bitsandbytes")
    with monkeypatch.context() as patch:
        patch.setattr(harness.models.loading, "check_computation", lambda policy: None)  # this would be that pass
        policy = fill_adapters(load(load_in="4bit", lora_rank=4, dtype=dtype))
    before = gradients(policy)
    assert all(gradient.abs().max() > 0 for gradient in before.values())
    sample(policy, PROMPTS, 3, max_new_tokens=4, key=(0,))
    assert cosine(gradients(policy), before) > 0.9999


def test_gradients_over_4_bit_weights_equal_dequantised_ones():
    """The same adapter over weights that were quantised and dequantised has the same gradients."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    quantised = fill_adapters(load(load_in="4bit", lora_rank=4))
    sample(quantised, PROMPTS, 3, max_new_tokens=4, key=(0,))
    rounded = fill_adapters(load(lora_rank=4))
    exact = copy.deepcopy(rounded)
    for module in rounded.modules():
        if isinstance(module, LoraLayer):
            weight = module.get_base_layer().weight.data
            packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
            weight.copy_(bitsandbytes.functional.dequantize_4bit(packed, state))
    torch.testing.assert_close(log_probs_of(quantised), log_probs_of(rounded), atol=1e-3, rtol=0)
    assert cosine(gradients(quantised), gradients(rounded)) > 0.999
    assert cosine(gradients(quantised), gradients(exact)) < 0.999  # the gradients agree because they share the rounding


# how many parameters -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_llama_8b_has_the_published_number_of_lora_parameters():
    """20,971,520 at rank 8, for all linear layers; tensors on the meta device have shapes and no data."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128_256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = add_adapter(LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False)), rank=8)
    expected = {"parameters": 8_030_261_248 + 20_971_520, "trained_parameters": 20_971_520}
    assert count_parameters(model) == expected


@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_counted_whatever_holds_them(capsys, way):
    """Tied weights count once, packed 4-bit weights individually; with the type that each kind is stored in."""
    if "load_in" in WAYS[way]:
        pytest.importorskip("bitsandbytes")
    stored = sum(weight.numel() for weight in load_file(TINY_POLICY / "model.safetensors").values())
    policy = load(**WAYS[way])
    adapters = sum(weight.numel() for name, weight in policy.named_parameters() if "lora_" in name)
    trained = adapters if WAYS[way] else stored
    assert count_parameters(policy.model) == {"parameters": stored + adapters, "trained_parameters": trained}
    frozen = "4 bits and float32" if "load_in" in WAYS[way] else "float32"
    share = f"({100 * trained / (stored + adapters):.2f}%), in float32" + f"; the others are in {frozen}" * bool(
        WAYS[way]
    )
    assert f"{trained:,} of {stored + adapters:,} parameters are trained {share}\n" in capsys.readouterr().out
