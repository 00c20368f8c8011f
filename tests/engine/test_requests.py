"""What an engine is asked for, step by step, and answers that could pass for complete ones."""

import pytest
import torch

from common.errors import EngineError

from harness.engines.engine import Engine
from harness.engines.folder import merged_weights

SHORT = (
    *("--steps", "3", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "6", "--eval-prompts", "1"),
    *("--eval-every", "0", "--checkpoint-every", "0", "--device", "cpu"),
)


def test_only_our_end_of_turn_ids_end_a_completion_and_nothing_is_penalised(stand_in, connect, policy):
    """Whatever the server's own defaults are."""
    server = stand_in()
    connect(server.url).sample(policy, [[5, 6, 7]], 1, max_new_tokens=4, key=(0, 1))
    asked = server.requests[-1]
    neutral = {"ignore_eos": True, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    neutral |= {"top_k": -1, "min_p": 0.0, "temperature": 1.0, "top_p": 1.0}
    assert {name: asked[name] for name in neutral} == neutral
    assert asked["stop_token_ids"] == policy.end_of_turn_ids


def test_a_completion_cut_off_below_the_budget_is_refused(stand_in, connect, policy):
    """It would be trained as if the policy had wanted to go on."""
    server = stand_in()
    engine = connect(server.url)
    policy.end_of_turn_ids, ends = [3], policy.end_of_turn_ids  # so that no row stops within four tokens
    try:
        server.fault("cut_short")
        with pytest.raises(EngineError, match="a completion whose end does not agree"):
            engine.sample(policy, [[5, 6, 7]], 1, max_new_tokens=4, key=(0, 1))
    finally:
        policy.end_of_turn_ids = ends


def test_one_step_ahead_asks_for_the_questions_of_the_next_step(load_script, stand_in, tmp_path, monkeypatch):
    """Each step's questions and seeds are those of the run that waits, also where the samples come a step earlier."""
    asked = {}
    for ahead in ("0", "1"):
        steps, begin = [], Engine.begin
        place = ("--runs-dir", str(tmp_path), "--engine-url", stand_in().url)

        def note(engine, *arguments, steps=steps, begin=begin, **settings):
            steps.append((settings["key"], settings["prompt_index"]))
            return begin(engine, *arguments, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "begin", note)
            load_script("experiment_engine/train.py").main([*SHORT, "--name", ahead, "--steps-ahead", ahead, *place])
        asked[ahead] = [(key, index) for key, index in steps if len(key) == 2 and key[1] < 10]  # no evaluations
    assert asked["0"] == asked["1"]
    assert [key for key, _ in asked["1"]] == [(0, 1), (0, 2), (0, 3)]


def test_all_active_adapters_are_merged(policy):
    """Two on one layer: both of their changes are in what the engine gets."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    plain = policy.model.state_dict()["model.layers.0.self_attn.q_proj.weight"].clone()
    model = get_peft_model(policy.model, settings, adapter_name="one")
    try:
        model.add_adapter("two", settings)
        model.base_model.set_adapter(["one", "two"])
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        expected = plain + layer.get_delta_weight("one") + layer.get_delta_weight("two")
        merged = merged_weights(model.get_base_model(), torch.float32)["model.layers.0.self_attn.q_proj.weight"]
        assert torch.allclose(merged, expected)
    finally:
        model.unload()
        policy.requires_grad_()  # other tests train it
