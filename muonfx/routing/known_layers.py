"""Tables of layers of known packages that hold several matrices, or store a matrix in another order than (out, in)."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass

from torch import nn

from muonfx.routing.stored_patterns import STACK, TRANSPOSED, TRANSPOSED_STACK


@dataclass(frozen=True)
class Fused:
    """A layer of a known package whose weight holds several matrices along its rows.

    The matrices have equal sizes and are stored one after another, unless ``sizes`` or ``pattern`` is set. Sizes are
    names of attributes of the holder, or formulas such as "a*b" and "a//b".
    """

    layer: str
    """A regular expression for the name of the layer, or of the parameter, in the module that holds it."""
    holder: str
    """A regular expression for the class of that module."""
    parts: str
    """The names of the matrices, separated by commas."""
    _: KW_ONLY
    count: int | None = None
    """The number of matrices of equal sizes, if it is not the number of names in ``parts``.

    It is 1 for a layer that is one matrix, although its name is the name of a fused layer elsewhere.
    """
    sizes: tuple[str, ...] | None = None
    """The number of rows of each matrix, if they differ."""
    pattern: str | None = None
    """The pattern of the rows, if they alternate; its sizes are in braces."""
    requires: str | None = None
    """An attribute of the holder that must be true for this entry to apply."""
    excludes: str | None = None
    """An attribute of the holder that must be false or missing for this entry to apply."""
    package: str = "transformers.models."
    """The package in which the class of the holder must be defined."""


@dataclass(frozen=True)
class Stored:
    """A parameter that a known package does not store as a matrix (out, in)."""

    module: str
    """A regular expression for the class of its module, or for a base of it."""
    leaf: str
    """A regular expression for the last component of its name."""
    pattern: str
    """The order of its dims, with ``{out}`` for the rows, which may be divided further."""
    note: str = ""
    """A text for `describe`; if it is empty, the note has the number of matrices of a stack."""


_QKV = "query, key, value"
_ANY = r".*"
_LATENT = "(heads={%s} (key={qk_nope_head_dim} + value={v_head_dim})) -> (heads key), (heads value)"
_FOCAL = "(query={dim} + context={dim} + gates) -> query, context, gates"
_BY_HEAD = "(heads={%s} part=3 dim) -> part (heads dim)"
# The first match applies. `holder` is the class that holds the layer. The entries are read from transformers 5.23, timm
# 1.0, diffusers 0.42 and torchtitan 0.3.0. Each applies to classes of its package only: a class of this name elsewhere
# may differ.
FUSED = (
    Fused("c_attn", "GPTBigCodeAttention", _QKV, sizes=("embed_dim", "kv_dim", "kv_dim"), requires="multi_query"),
    Fused("c_attn", "GPTBigCodeAttention", _QKV, pattern=_BY_HEAD % "num_heads", excludes="is_cross_attention"),
    Fused(
        "c_attn",
        "(GPT2|DecisionTransformerGPT2|ImageGPT)Attention",
        "key, value",
        requires="is_cross_attention",
    ),
    Fused("c_attn", "(GPT2|DecisionTransformerGPT2|ImageGPT)?Attention", _QKV),
    Fused(
        "qkv_proj",
        "(Phi3|Phi4Multimodal)Attention",
        _QKV,
        sizes=("config.num_attention_heads*head_dim", "num_key_value_heads*head_dim", "num_key_value_heads*head_dim"),
    ),
    # Four groups of query, value and key, in this order, were the cores of a TPU.
    Fused("qkv_proj", "CodeGenAttention", "query, value, key", pattern="(cores=4 part=3 dim) -> part (cores dim)"),
    Fused("qkv_proj", "MiniMaxLightningAttention", _QKV, pattern=_BY_HEAD % "num_attention_heads"),
    Fused("Wqkv", "DbrxAttention", _QKV, sizes=("hidden_size", *("num_key_value_heads*head_dim",) * 2)),
    Fused("Wqkv", "(ModernBertAttention|MptAttention)", _QKV),
    Fused("att_proj", "Bark.*Attention", _QKV),
    Fused("qkv", "Exaone4_5_VisionAttention", _QKV, sizes=("q_dim", "kv_dim", "kv_dim")),
    Fused("qkv", ".*(Vision|Blip|Mgpstr|PPOCR|Sam|Hiera|SegGpt|Timesformer|VitDet).*Attention", _QKV),
    Fused(
        "query_key_value",
        "Falcon.*Attention",
        _QKV,
        pattern="(groups={num_kv_heads} (query={num_heads//num_kv_heads} + key=1 + value=1) dim) "
        "-> (groups query dim), (groups key dim), (groups value dim)",
        requires="new_decoder_architecture",
    ),
    Fused(
        "query_key_value",
        "Falcon.*Attention",
        _QKV,
        sizes=("num_heads*head_dim", "head_dim", "head_dim"),
        requires="multi_query",
    ),
    Fused("query_key_value", "GPTNeoXAttention", _QKV, pattern=_BY_HEAD % "config.num_attention_heads"),
    Fused("query_key_value", "GPTNeoXJapaneseAttention", _QKV, pattern=_BY_HEAD % "num_attention_heads"),
    Fused("query_key_value", "(Bloom|Persimmon|Falcon).*Attention", _QKV, pattern=_BY_HEAD % "num_heads"),
    Fused(
        "q_proj",
        "Qwen(3Next|3_5|3_5Moe|4ExpText)Attention",
        "query, gate",
        pattern="(heads={config.num_attention_heads} (query={head_dim} + gate={head_dim})) "
        "-> (heads query), (heads gate)",
    ),
    Fused(
        "q_gate_proj",
        "AXK2Attention",
        "query, gate",
        pattern="(heads={num_heads} (query={qk_head_dim} + gate={v_head_dim})) -> (heads query), (heads gate)",
    ),
    Fused(
        "queries_keys_values",
        "LevitAttention",
        _QKV,
        pattern="(heads={num_attention_heads} (query={key_dim} + key={key_dim} + value)) "
        "-> (heads query), (heads key), (heads value)",
    ),
    Fused(
        "keys_values",
        "LevitAttentionSubsample",
        "key, value",
        pattern="(heads={num_attention_heads} (key={key_dim} + value)) -> (heads key), (heads value)",
    ),
    Fused("dense", "PPDocLayout.*GlobalPointer", "query, key"),
    Fused("qkv_opreact", "xLSTMLayer", "query, key, value, gate", sizes=("qk_dim", "qk_dim", "v_dim", "v_dim")),
    Fused("ifgate_preact", "xLSTMLayer", "input gate, forget gate"),
    Fused("proj_up_gate_z", "xLSTMFeedForward", "gate, value"),
    Fused("in_proj_qkv", ".*GatedDeltaNet", _QKV, sizes=("key_dim", "key_dim", "value_dim")),
    Fused(
        "in_proj_qkvz",
        ".*GatedDeltaNet",
        "query, key, value, gate",
        pattern="(heads={num_k_heads} (query={head_k_dim} + key={head_k_dim} + value={value_dim//num_k_heads} + "
        "gate={value_dim//num_k_heads})) -> (heads query), (heads key), (heads value), (heads gate)",
    ),
    Fused("in_proj_ba", ".*GatedDeltaNet", "b, a", pattern="(heads={num_k_heads} part=2 dim) -> part (heads dim)"),
    Fused("kv_proj", "JetMoeAttention", "key, value"),
    Fused("kv_proj", "DeepseekV4(Attention|HCACompressor)", "shared by key and value", count=1),
    Fused("(kv|gate)_proj", "DeepseekV4(CSACompressor|Indexer)", "previous window, current window"),
    Fused("to_kv", _ANY, "key, value"),
    Fused("kv_a_proj_with_mqa", _ANY, "latent, rotary", sizes=("kv_lora_rank", "qk_rope_head_dim")),
    Fused("kv_b_proj", _ANY, "key, value", pattern=_LATENT % "num_heads"),
    Fused("in_proj", "(Mamba|FalconMamba|JambaMamba)Mixer", "state, gate"),
    Fused("in_proj", "ZambaMambaMixer", "state, gate", pattern="(dim part=2) -> part dim"),
    Fused(
        "in_proj",
        "(Mamba2|Bamba|FalconH1|NemotronHMamba2|GraniteMoeHybridMamba|Zamba2Mamba)(Mixer|Layer)",
        "gate, state, B, C, dt",
        sizes=(*("intermediate_size",) * 2, *("n_groups*ssm_state_size",) * 2, "num_heads"),
    ),
    Fused("in_proj", "Lfm[23].*ShortConv", "B, C, state"),
    Fused("in_proj", "DisentangledSelfAttention", _QKV, pattern=_BY_HEAD % "num_attention_heads"),
    Fused("[wv][12]", "DbrxExpertGLU", "one matrix an expert", pattern="(part={moe_num_experts} out) -> part out"),
    Fused(
        "o_a_proj", "DeepseekV4Attention", "one matrix a group", pattern="(part={o_a_proj.n_groups} out) -> part out"
    ),
    Fused("gate_up_proj", "GptOssExperts", "gate, up", pattern="(dim part=2) -> part dim"),
    Fused("gate_up_proj", _ANY, "gate, up"),
    Fused("input_linear", "(Granite|JetMoe).*(MLP|MoE)", "gate, up"),
    Fused("Wi", "ModernBert.*MLP", "value, gate"),
    Fused("fc1", "Moonshine.*DecoderMLP", "value, gate"),
    Fused("fc1", "(Moshi|KyutaiSpeechToText)GatingMLP", "gate, value"),
    Fused("linear_1", "Cohere2VisionMultiModalProjector", "value, gate"),
    Fused("linear_start", "Gemma.*LightConv1d", "value, gate"),
    Fused("ext_pw_conv_1d", "Phi4MultimodalAudioGluPointWiseConv", "value, gate"),
    Fused("proj", "ClvpGatedLinearUnit", "value, gate"),
    Fused("pointwise_(conv|lin)1", ".*ConvolutionModule", "value, gate"),
    Fused("up_conv", "GraniteSpeech.*ConvModule", "value, gate"),
    Fused("((residual|self_attn)_)?conv", ".*AdapterLayer", "value, gate"),
    Fused("conv_layers", "Conv1dSubsampler", "value, gate"),
    Fused("linear", "Qwen2_5_OmniAdaLayerNormZero", "six modulations", count=6),
    Fused("linear", "Qwen2_5_OmniAdaLayerNormZero_Final", "scale, shift"),
    Fused("adaln_linear", "EsmFold2AtomLayer", "six modulations", count=6),
    Fused("conv_proj|project", "Vits(PosteriorEncoder|TextEncoder)", "mean, log variance"),
    Fused("projection_in", "FocalNetModulation", "query, context, gates", pattern=_FOCAL),
    # timm: query, key and value one after another, or head by head.
    Fused("qkv", _ANY, _QKV, pattern=_BY_HEAD % "num_heads", requires="head_first", package="timm."),
    Fused(
        "qkv",
        "Attention(Downsample)?",
        _QKV,
        pattern="(heads={num_heads} (query={key_dim} + key={key_dim} + value={val_dim})) "
        "-> (heads query), (heads key), (heads value)",
        requires="key_dim",
        package="timm.",
    ),
    Fused("qkv", "WindowAttentionGlobal", "key, value", requires="use_global", package="timm."),
    Fused(
        "qkv",
        "(Mask|Eva|Window|WindowMultiHead|MultiScale|MaskUnit|RelPos|Channel|Diff)?Attention(V2|2d|Cl|Rope|Global)?|XCA|MHSA"
        "|TalkingHeadAttn|CrossCovarianceAttn|LocallyGroupedAttn|FactorAttnConvRelPosEnc|(Rot)?AttentionPool2d",
        _QKV,
        package="timm.",
    ),
    Fused("qkv", "BottleneckAttn", _QKV, sizes=("dim_out_qk", "dim_out_qk", "dim_out_v"), package="timm."),
    Fused("qkv", "LambdaLayer", _QKV, sizes=("num_heads*dim_qk", "dim_qk", "dim_v"), package="timm."),
    Fused("qkv", "LiteMLA", _QKV, pattern="(heads part=3 dim={dim}) -> part (heads dim)", package="timm."),
    Fused(
        "qkv_proj",
        "LinearSelfAttention",
        _QKV,
        pattern="(query=1 + key={embed_dim} + value={embed_dim}) -> query, key, value",
        package="timm.",
    ),
    Fused("pwise", "ConvAttention", _QKV, pattern=_BY_HEAD % "num_heads", package="timm."),
    Fused("qk", "Attention|GPSA", "query, key", package="timm."),
    Fused(
        "kv",
        "HaloAttn",
        "key, value",
        pattern="(heads={num_heads} (key={dim_head_qk} + value={dim_head_v})) -> (heads key), (heads value)",
        package="timm.",
    ),
    Fused(
        "kv",
        "AttentionDownsample",
        "key, value",
        pattern="(heads={num_heads} (key={key_dim} + value={val_dim})) -> (heads key), (heads value)",
        package="timm.",
    ),
    Fused("kv", "(Class|GlobalSubSample)?Att(entio)?n(PoolLatent)?", "key, value", package="timm."),
    Fused("fc1", "GluMlp", "value, gate", package="timm."),
    Fused("fc1", "GatedConvBlock", "gate, value", package="timm."),
    Fused(
        "fc_select",
        "SelectiveKernelAttn",
        "one matrix a path",
        pattern="(part={num_paths} out) -> part out",
        package="timm.",
    ),
    Fused("hz_proj", "HSMSSD", "state, gate", package="timm."),
    Fused("BCdt_proj", "HSMSSD", "B, C, dt", package="timm."),
    Fused("v_gate", "SHMA", "value, gate", package="timm."),
    Fused(
        "in_proj",
        "(Diff)?ParallelScalingBlock",
        "mlp, query, key, value",
        pattern="(mlp + query={in_proj.in_features} + key={in_proj.in_features} + value={in_proj.in_features}) "
        "-> mlp, query, key, value",
        package="timm.",
    ),
    Fused("f", "FocalModulation", "query, context, gates", pattern=_FOCAL, package="timm."),
    Fused("proj", "GEGLU|SwiGLU", "value, gate", package="diffusers."),
    # diffusers: scales, shifts and gates of norms, in equal parts.
    Fused("linear", "SD35AdaLayerNormZeroX", "nine modulations", count=9, package="diffusers."),
    Fused("linear", "AdaLayerNormZeroSingle", "three modulations", count=3, package="diffusers."),
    Fused("linear", "LuminaRMSNormZero", "four modulations", count=4, package="diffusers."),
    Fused(
        "linear", "(AdaLayerNorm(Zero|Single)|CogVideoXLayerNormZero)", "six modulations", count=6, package="diffusers."
    ),
    Fused("linear", "(AdaLayerNorm(Continuous)?|AdaGroupNorm)", "scale, shift", package="diffusers."),
    Fused("proj_out_1", "(DiT)?Transformer2DModel", "shift, scale", package="diffusers."),
    Fused(
        "wqkv",
        "FusedQKVLinear",
        _QKV,
        pattern="(groups (query={heads_per_kv} + key=1 + value=1) dim={head_dim}) "
        "-> (groups query dim), (groups key dim), (groups value dim)",
        package="torchtitan.",
    ),
    Fused("wkv_a", "Attention", "latent, rotary", sizes=("kv_lora_rank", "qk_rope_head_dim"), package="torchtitan."),
    Fused("wkv_b", "Attention", "key, value", pattern=_LATENT % "n_heads", package="torchtitan."),
    Fused(
        "mlp1_weight_EGD", "GptOssGroupedExperts", "gate, up", pattern="(dim part=2) -> part dim", package="torchtitan."
    ),
    Fused("qkv", "SelfAttention", _QKV, package="torchtitan."),
    Fused(
        "linear1",
        "SingleStreamBlock",
        "query, key, value, mlp",
        sizes=("hidden_size", "hidden_size", "hidden_size", "mlp_hidden_dim"),
        package="torchtitan.",
    ),
)
# Modules of PyTorch, names of their parameters, and the number of matrices along the rows. A plain RNN has no gates.
FUSED_IN_TORCH = (
    (nn.MultiheadAttention, "in_proj_weight", 3, _QKV),
    ((nn.LSTM, nn.LSTMCell), "weight_(ih|hh)", 4, "4 gates"),
    ((nn.GRU, nn.GRUCell), "weight_(ih|hh)", 3, "3 gates"),
)
# Names of layers that are nearly always fused, for unknown code, and names for their parts.
SUSPECTS = (
    (re.compile(r"(.*_)?w?qkv(_.*)?|c_attn|query_key_value|in_proj_weight", re.IGNORECASE), ("q", "k", "v")),
    (re.compile(r"(.*_)?w?kv(_proj|_linear)?", re.IGNORECASE), ("k", "v")),
    (re.compile(r"(fused_)?(gate_up|up_gate)(_proj)?|w1_?w?[23]", re.IGNORECASE), ("a", "b")),
)
STORED = (
    Stored("Conv1D", "weight", TRANSPOSED),
    Stored(".*MultiModalProjector", "mm_input_projection_weight", TRANSPOSED),
    Stored("XLNetRelativeAttention", "[qkvr]", "in heads dim -> (heads dim) in", note="heads side by side"),
    Stored("XLNetRelativeAttention", "o", "out heads dim -> out (heads dim)", note="heads side by side"),
    Stored("FunnelRelMultiheadAttention", "r_kernel", "in heads dim -> (heads dim) in", note="heads side by side"),
    Stored("RecurrentGemmaRglru", "(input|recurrent)_gate_weight", TRANSPOSED_STACK),
    Stored("GroupedLinearLayer", "weight", TRANSPOSED_STACK),
    Stored(".*FlexibleLinear", "weight", STACK),
)
