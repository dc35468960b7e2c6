"""Every model family of mlx-lm as a tiny random model, built from mlx-lm's own classes."""

import dataclasses
import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import MODEL_REMAPPING
from tiny import HIDDEN, NUM_LAYERS, VOCAB, WINDOW, randomize

from dflash2_mlx.models.cache import leaves
from dflash2_mlx.target import Target

# Value and the config fields that take it, in whichever family has such a field.
SIZES: list[tuple[Any, str]] = [
    (HIDDEN, "hidden_size hidden_dim d_model n_embd model_dim"),
    (NUM_LAYERS, "num_hidden_layers num_layers n_layers n_layer num_transformer_layers"),
    (VOCAB, "vocab_size num_vocab vocab_size_per_layer_input"),
    (4, "num_attention_heads num_heads n_heads n_head num_query_heads"),
    (2, "num_key_value_heads num_kv_heads n_kv_heads num_attention_groups"),
    (16, "head_dim v_head_dim hidden_size_per_head kv_channels"),
    (96, "intermediate_size n_inner ffn_hidden_size ff_intermediate_size"),
    (4096, "max_position_embeddings n_positions n_ctx model_max_length block_size"),
    (10_000.0, "rope_theta rotary_emb_base rope_embedding_base rope_local_base_freq"),
    (1e-5, "rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon"),
    (1e-5, "norm_epsilon"),
    (False, "attention_bias mlp_bias use_bias tie_word_embeddings use_qkv_bias"),
    (0.5, "partial_rotary_factor rotary_pct"),
    (8, "rotary_dim"),
    # windows, shorter than the texts of the tests
    (WINDOW, "sliding_window sliding_window_size window_size attention_window_size"),
    (2, "sliding_window_pattern"),
    # latent attention
    (16, "kv_lora_rank q_lora_rank"),
    (8, "qk_rope_head_dim qk_nope_head_dim"),
    # experts
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
    (32, "moe_shared_expert_intermediate_size expert_ffn_hidden_size share_expert_dim"),
    (1, "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts"),
    (1, "decoder_sparse_step n_group topk_group first_k_dense_replace moe_layer_freq"),
    (1, "num_dense_layers"),
    (1.0, "routed_scaling_factor"),
    (True, "norm_topk_prob use_qk_norm"),
    ([], "mlp_only_layers"),
    ("sigmoid", "scoring_func"),
    ("noaux_tc", "topk_method"),
    # recurrence
    (4, "linear_num_value_heads conv_kernel linear_conv_kernel_dim mamba_d_conv conv_L_cache"),
    (4, "mamba_n_heads mamba_num_heads short_conv_kernel_size conv1d_width"),
    (2, "linear_num_key_heads mamba_expand"),
    (16, "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim"),
    (8, "state_size ssm_state_size mamba_d_state"),
    (1, "n_groups mamba_n_groups"),
    (False, "mamba_proj_bias conv_bias"),
    (True, "use_conv_bias mamba_conv_bias"),
    (4, "time_step_rank"),
]

SLIDING, FULL = "sliding_attention", "full_attention"
ALTERNATING = [SLIDING, FULL, SLIDING, FULL]
ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
YARN = {
    **ROPE,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MULTIPLIERS = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
}
SPARSE = {"index_head_dim": 16, "index_n_heads": 4, "index_topk": 24}
KDA = {"kda_layers": [1, 2, 3], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}

# What a family needs besides: values of its own fields.
FAMILIES: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": ALTERNATING},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 4, "group_norm_size": 2},
    "bailing_moe_linear": {"layer_group_size": 4, "group_norm_size": 2},
    "bailing_moe_v3": {"layer_group_size": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": YARN},
    "deepseek_v32": SPARSE,
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": ALTERNATING, "is_moe_layer": [False, True] * 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gear": {"layer_types": [SLIDING, "conv_mixer", FULL, "conv_mixer"]},
    "gemma3n": {
        "num_kv_shared_layers": 2,
        "final_logit_softcapping": 30.0,
        "layer_types": ALTERNATING,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
    "gemma4_text": {
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "rope_parameters": {SLIDING: ROPE, FULL: {**ROPE, "partial_rotary_factor": 0.25}},
        "partial_rotary_factor": 1.0,
        "layer_types": ALTERNATING,
    },
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {**SPARSE, "rope_parameters": ROPE},
    "granite": MULTIPLIERS,
    "granitemoe": MULTIPLIERS,
    "granitemoehybrid": {**MULTIPLIERS, "layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 4.0},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": {
        "linear_attn_config": {**KDA, "gate_lower_bound": -5.0},
        "attn_res_block_size": 2,
        "activation_situ_beta": 1.0,
    },
    "kimi_linear": {"linear_attn_config": KDA},
    "laguna": {"layer_types": ALTERNATING},
    "lfm2": {
        "block_dim": HIDDEN,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "lfm2_moe": {"use_expert_bias": True, "full_attn_idxs": [1, 3]},
    "llama": {"layer_types": ALTERNATING},
    "llama4": {
        "attention_chunk_size": WINDOW,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
        "num_experts_per_tok": 1,
        "rope_scaling": None,
    },
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "zero_expert_num": 1,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {
        "zero_expert_num": 1,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 4,
    },
    "mamba2": {"time_step_limit": (0.001, 100.0)},
    "mellum": {"layer_types": ALTERNATING, "rope_parameters": {SLIDING: ROPE, FULL: ROPE}},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_rope_theta": 10_000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0},
    "minicpm3": {"rope_scaling": YARN, "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0},
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1, 1, 1],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 3,
        "sparse_attention_freq": [0, 1, 0, 1],
    },
    "ministral3": {"rope_parameters": YARN, "layer_types": ALTERNATING},
    "mistral4": {"rope_parameters": YARN},
    "muse_glimmer": {"layer_types": [SLIDING] * 3 + [FULL]},
    "muse_spark": {
        "post_norm_eps": 1e-5,
        "rope_parameters": ROPE,
        "layer_rope_theta": [10_000.0] * 3 + [0],
        "layer_types": [SLIDING] * 3 + [FULL],
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.2,
        "moe_hidden_size": 32,
        "num_shared_experts": 0,
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        ]
        * 2
    },
    "nemotron_h": {"hybrid_override_pattern": list("M*E-")},
    "olmo_hybrid": {"linear_allow_neg_eigval": True},
    "openelm": {
        "ffn_dim_divisor": 8,
        "num_query_heads": [4] * 4,
        "num_kv_heads": [2] * 4,
        "ffn_multipliers": [1.0] * 4,
    },
    "phi3small": {"dense_attention_every_n_layers": 2, "gegelu_limit": 20.0},
    "plamo": {"n_shared_head": 2},
    "qwen3_5": {"num_experts": 0},
    "qwen3_5_moe": {"num_experts": 4},
    "recurrent_gemma": {
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "recurrent", "attention", "recurrent"],
    },
    "rwkv7": dict.fromkeys(
        ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 8
    ),
    "spark2_5": {"rope_parameters": {SLIDING: ROPE, FULL: ROPE}},
}

# Families whose config holds another one, and the class that reads it.
TEXT_CONFIGS = {
    "gemma3": "gemma3_text.ModelArgs",
    "gemma3n": "gemma3n.TextConfig",
    "gemma4": "gemma4_text.ModelArgs",
    "kimi_k25": "deepseek_v3.ModelArgs",
    "kimi_k3": "kimi_k3.TextArgs",
    "kimi_vl": "kimi_vl.TextArgs",
    "lfm2-vl": "lfm2.ModelArgs",
    "llama4": "llama4.TextArgs",
    "minimax_m3_vl": "minimax_m3_vl.TextArgs",
    "mistral3": "ministral3.ModelArgs",
    "muse_spark": "muse_spark.TextArgs",
    "pixtral": "llama.ModelArgs",
    "qwen2_vl": "qwen2.ModelArgs",
    "qwen3_5": "qwen3_5.TextModelArgs",
    "qwen3_5_moe": "qwen3_5.TextModelArgs",
    "qwen3_vl": "qwen3.ModelArgs",
    "qwen3_vl_moe": "qwen3_moe.ModelArgs",
}


# Families that are not tested, with the reason.
UNTESTED = {
    "bitnet": "its kernels need Metal",
    "muse_spark": "its kernels need Metal",
    "olmo": "mlx-lm needs the package ai2-olmo for it",
    "prism_hadamard_qwen35": "qwen3_5 with packed layers of 2 bits, which random weights cannot be",
}
# Weights at which the output says something else at every step, where 0.25 is not it.
SCALES = {"gemma3n": 0.1, "qwen3_moe": 0.35, "qwen3_vl_moe": 0.35}


def file_of(family: str) -> Any:
    """mlx-lm's module for a family."""
    return importlib.import_module(f"mlx_lm.models.{family}")


def _is_family(file: str) -> bool:
    return file in UNTESTED or hasattr(file_of(file), "ModelArgs")


ALL = [file.name for file in pkgutil.iter_modules(mlx_lm.models.__path__) if _is_family(file.name)]
TESTED = [family for family in ALL if family not in UNTESTED]


def config(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of the tiny model of a family, with `changes` to the text model's."""
    if family not in TEXT_CONFIGS:
        return _values(family, file_of(family).ModelArgs) | changes
    text_family, _, name = TEXT_CONFIGS[family].partition(".")
    text = _values(text_family, getattr(file_of(text_family), name))
    text |= FAMILIES.get(family, {}) | changes
    return {"model_type": family, "vocab_size": VOCAB, "text_config": text}


def _values(family: str, args: type) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(args)}
    sizes = {name: value for value, names in SIZES for name in names.split() if name in fields}
    return {"model_type": family, **sizes, **FAMILIES.get(family, {})}


def build_bare(family: str, **changes: Any) -> nn.Module:
    """The tiny model of a family, its weights not drawn yet: free of cost."""
    file = file_of(family)
    return file.Model(file.ModelArgs.from_dict(config(family, **changes)))


def build(family: str, seed: int = 3, **changes: Any) -> nn.Module:
    """The tiny model of a family with random weights, float32."""
    model = randomize(build_bare(family, **changes), seed, SCALES.get(family, 0.25))
    # Vectors are drawn around 1, as norms want it: biases belong around 0, and decay is slow.
    shifts = {"bias": -1.0, "A_log": -3.0}
    for path, value in tree_flatten(model.parameters()):
        shift = next((shifts[end] for end in shifts if path.endswith(end)), 0.0)
        if value.ndim == 1 and shift:
            model.update(tree_unflatten([(path, value + shift)]))
    if hasattr(model, "_dummy_tokenizer_ids"):
        model._dummy_tokenizer_ids = mx.array([VOCAB - 1])  # phi3small's lie beyond the tiny table
    return model


@dataclass(frozen=True, slots=True)
class Family:
    """A row of docs/families.md."""

    names: str
    caches: str = ""
    drafting: str = "not tested"
    reason: str = ""


def describe(family: str) -> Family:
    """What the engine says of a family's tiny model."""
    names = [family, *(alias for alias, name in MODEL_REMAPPING.items() if name == family)]
    shown = ", ".join(f"`{name}`" for name in names)
    if family in UNTESTED:
        return Family(shown, reason=UNTESTED[family])
    model = build_bare(family)
    kinds = sorted({type(leaf).__name__ for leaf in leaves(make_prompt_cache(model))})
    problem = Target(model).undraftable
    return Family(shown, ", ".join(kinds), "no" if problem else "yes", problem or "")
