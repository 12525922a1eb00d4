"""config.json of both generations -> ModelConfig: the right values, and refusals by name."""

import json
import math

import pytest
from model_files import DATA, TINY

from jaxkv.config import RopeConfig
from jaxkv.io.generation import GenerationDefaults, generation_from_folder
from jaxkv.io.hf_config import config_from_hf, read_hf_config

SMALL = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip


def config(kind="llama", **fields):
    return config_from_hf(SMALL | {"model_type": kind} | fields)


@pytest.mark.parametrize("tiny", TINY)
def test_the_tiny_models_have_the_shapes_of_their_files(tiny):
    given = json.loads((DATA / "hf_tiny" / tiny / "config.json").read_text())
    got = read_hf_config(DATA / "hf_tiny" / tiny)
    assert got.architecture == given["model_type"].removesuffix("_text")
    assert (got.vocab_size, got.num_layers) == (given["vocab_size"], given["num_hidden_layers"])
    assert got.head_dim == (given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"])


OLD_AND_NEW = {
    "default": ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
    "linear": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
    ),
    "llama3": (
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        },
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024, "rope_theta": 5e5,
        },
    ),
    "yarn": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 5e5},
    ),
    "partial": (
        {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OLD_AND_NEW)
def test_both_generations_of_rope_settings_agree(kind):
    old, new = OLD_AND_NEW[kind]
    first, second = config(**old), config(rope_parameters=new)
    assert first == second
    assert first.ropes[0].theta == 5e5
    assert first.ropes[0].kind == ("default" if kind == "partial" else kind)
    assert first.ropes[0].rotary_dim == (8 if kind == "partial" else 0)


def test_rope_scaling_null_and_missing_are_the_default():
    assert config(rope_scaling=None) == config() == config(rope_parameters=None)
    assert config().ropes == (RopeConfig(theta=10_000.0),)


def yarn(**fields):
    return config(rope_scaling={"rope_type": "yarn", "factor": 4.0, **fields}).ropes[0]


def test_yarn_settings():
    assert yarn().original_max_positions == 4096  # the default is max_position_embeddings
    assert yarn().attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert yarn(attention_factor=0.7).attention_factor == 0.7
    both = yarn(mscale=0.707, mscale_all_dim=1.0).attention_factor
    assert both == pytest.approx((0.0707 * math.log(4) + 1) / (0.1 * math.log(4) + 1))
    assert yarn(mscale=0.707).attention_factor == yarn().attention_factor
    assert (yarn().beta_fast, yarn().beta_slow, yarn().truncate) == (32, 1, True)
    assert (yarn(beta_fast=16, beta_slow=2).beta_fast, yarn(truncate=False).truncate) == (16, False)
    assert yarn(factor=None, original_max_position_embeddings=512).factor == 8
    top = config(rope_scaling={"type": "yarn", "factor": 2.0}, original_max_position_embeddings=99)
    assert top.ropes[0].original_max_positions == 99


def test_gemma3_of_both_generations():
    old = config(
        "gemma3_text",
        rope_theta=2e6,
        rope_local_base_freq=777.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=3,
        sliding_window=10,
    )
    new = config(
        "gemma3_text",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 777.0},
        },
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=10,
    )
    assert old == new
    assert old.layer_windows == (10, 10, 0) * 2
    assert [old.ropes[i].theta for i in old.layer_ropes] == [777.0, 777.0, 2e6] * 2
    assert [old.ropes[i].factor for i in old.layer_ropes] == [1, 1, 8] * 2
    assert config("gemma3_text", _sliding_window_pattern=3, sliding_window=10).layer_windows == (10, 10, 0) * 2
    inside = config_from_hf({"model_type": "gemma3", "text_config": SMALL | {"sliding_window": 10}})
    assert inside == config("gemma3_text", sliding_window=10)
    assert inside.ropes == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))
    assert (inside.norm_placement, inside.qk_norm, inside.embed_scale) == ("both", "head", 8.0)
    assert (inside.query_scale, inside.attn_soft_cap, inside.tie_embeddings) == (1 / 16, None, True)


def test_gemma2():
    got = config("gemma2", query_pre_attn_scalar=144, attn_logit_softcapping=None, hidden_activation=None, hidden_act="gelu")
    assert (got.query_scale, got.attn_soft_cap, got.final_soft_cap) == (1 / 12, None, 30.0)
    assert (got.activation, got.layer_windows, got.head_dim) == ("gelu_tanh", (4096, 0) * 3, 256)
    assert config("gemma2", hidden_activation="gelu").activation == "gelu"


def test_windows_by_family():
    assert config("mistral").layer_windows == (4096,) * 6
    assert config("mistral", sliding_window=None).layer_windows == (0,) * 6
    assert config("mixtral").layer_windows == (0,) * 6
    assert config("phi3", sliding_window=7).layer_windows == (7,) * 6
    assert config("qwen2", sliding_window=9).layer_windows == (0,) * 6
    on = {"use_sliding_window": True, "sliding_window": 9}
    assert config("qwen2", **on, max_window_layers=4).layer_windows == (0, 0, 0, 0, 9, 9)
    assert config("qwen3", **on).layer_windows == (0,) * 6  # max_window_layers is 28
    assert config("qwen3_moe", **on).layer_windows == (9,) * 6
    kinds = ["full_attention", "sliding_attention"] * 3
    assert config("qwen3", **on, layer_types=kinds).layer_windows == (0, 9) * 3


def test_biases_heads_and_norms_by_family():
    assert (config().qkv_bias, config().out_bias, config().mlp_bias) == (False, False, False)
    biased = config(attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.out_bias, biased.mlp_bias) == (True, True, True)
    assert (config("qwen2").qkv_bias, config("qwen2").out_bias) == (True, False)
    assert (config("qwen3", attention_bias=True).out_bias, config("qwen3").head_dim) == (True, 128)
    assert (config("qwen3", head_dim=None).head_dim, config(head_dim=None).head_dim, config(head_dim=32).head_dim) == (
        16,
        16,
        32,
    )
    assert config(num_key_value_heads=None).num_kv_heads == 4
    olmo = config("olmo2")
    assert (olmo.norm_placement, olmo.qk_norm, olmo.norm_eps) == ("post", "projection", 1e-5)


def test_mixtures():
    mixtral = config("mixtral", num_local_experts=4)
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.expert_mlp_dim) == (4, 2, 96)
    assert (mixtral.moe_layers, mixtral.normalize_router) == ((True,) * 6, True)
    qwen = config("qwen3_moe", num_experts=16, decoder_sparse_step=2, mlp_only_layers=[3], moe_intermediate_size=24)
    assert qwen.moe_layers == (False, True, False, False, False, True)
    assert (qwen.num_experts, qwen.expert_mlp_dim, qwen.mlp_dim, qwen.normalize_router) == (16, 24, 96, False)
    assert config("qwen3_moe", num_local_experts=32, norm_topk_prob=True).normalize_router


REFUSED = {
    "architecture": ({"model_type": "mamba2"}, r"'mamba2' is not supported; supported: gemma2, gemma3"),
    "no architecture": ({"model_type": None}, "None is not supported"),
    "activation": ({"hidden_act": "relu2"}, r"'relu2' is not supported; supported: silu"),
    "gemma activation": ({"model_type": "gemma2", "hidden_activation": "relu"}, "'relu' is not supported"),
    "rope kind": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        r"'dynamic' is not supported; supported: default",
    ),
    "longrope": ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "'longrope' is not supported"),
    "su": ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, "'su' is not supported"),
    "phi3 yarn": ({"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 2.0}}, "not supported for phi3"),
    "rope without factor": ({"rope_scaling": {"type": "linear"}}, "needs a number for 'factor'"),
    "rope no object": ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
    "rope layer type": ({"rope_parameters": {"full_attention": {}, "chunked_attention": {}}}, "'chunked_attention'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
    "layer type": ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 6}, "'linear_attention'"),
    "layer type count": ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "must list 6 layers"),
    "window missing": ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 6}, "sliding_window is not set"),
    "text_config": ({"text_config": {}}, "text_config is only supported for gemma3"),
    "bidirectional": ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
    "heads": ({"num_attention_heads": 5}, "multiple of num_kv_heads=2"),
    "no heads": ({"num_attention_heads": 0}, "impossible"),
    "text number": ({"hidden_size": "64"}, "hidden_size must be a count, got '64'"),
    "float count": ({"num_hidden_layers": 6.0}, "must be a count"),
    "NaN": ({"rms_norm_eps": float("nan")}, "must be a finite number"),
    "flag": ({"tie_word_embeddings": "yes"}, "must be true or false"),
    "layers": ({"num_hidden_layers": 1 << 30}, "impossible"),
    "rotary": ({"partial_rotary_factor": 0.0}, "leaves 0 rotated dims"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind):
    fields, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        config(fields.get("model_type", "llama"), **{k: v for k, v in fields.items() if k != "model_type"})


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
def test_a_size_that_is_not_there_is_not_guessed(name):
    given = {key: value for key, value in SMALL.items() if key != name}
    with pytest.raises(ValueError, match=f"config.json: {name} missing; is the file whole"):
        config_from_hf(given | {"model_type": "llama"})
    # Gemma 3's published text_config has only what differs from its family's.
    assert config_from_hf({"model_type": "gemma3", "text_config": given}).num_layers in (6, 26)


@pytest.mark.parametrize("tiny", TINY)
def test_whatever_a_field_holds_the_error_is_a_value_error(tiny):
    """Every field of the file and those it may have, one at a time; scales of queries were the square root of 0 or of less."""
    given = json.loads((DATA / "hf_tiny" / tiny / "config.json").read_text())
    for name in {*given, "head_dim", "query_pre_attn_scalar", "rope_scaling", "sliding_window", "layer_types"}:
        for value in (0, -1, 1, 10**9, 1 << 40, None, "x", "0", [], [0], {}, True, float("nan"), 1e-320, -1.0):
            try:
                got = config_from_hf(given | {name: value})
            except ValueError:
                continue
            assert isinstance(got.query_scale, float) and got.query_scale > 0, (name, value)


def test_broken_files(tmp_path):
    with pytest.raises(ValueError, match=r"no config.json"):
        read_hf_config(tmp_path)
    for content, message in (
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b"\xff", "not valid JSON"),
        (b"[" * 99_999, "valid"),
    ):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_hf_config(tmp_path)


def test_generation_defaults(tmp_path):
    assert generation_from_folder(tmp_path) == GenerationDefaults()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert generation_from_folder(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4, 3], "temperature": 0.6, "top_k": 20}')
    assert generation_from_folder(tmp_path) == GenerationDefaults((3, 4), temperature=0.6, top_k=20)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ValueError, match="eos_token_id must be an id or a list"):
        generation_from_folder(tmp_path)
