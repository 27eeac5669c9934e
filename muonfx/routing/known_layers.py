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
    """A regular expression for the class of the module that holds the layer, and the name of the layer in this module,
    such as "GPT2Attention:c_attn". The name may also be of a parameter."""
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
_LATENT = "(heads={%s} (key={qk_nope_head_dim} + value={v_head_dim})) -> (heads key), (heads value)"
_FOCAL = "(query={dim} + context={dim} + gates) -> query, context, gates"
_BY_HEAD = "(heads={%s} part=3 dim) -> part (heads dim)"
# The first match applies. `holder` is the class that holds the layer. The entries are read from transformers 5.23, timm
# 1.0, diffusers 0.42 and torchtitan 0.3.0. Each applies to classes of its package only: a class of this name elsewhere
# may differ.
FUSED = (
    Fused(
        "GPTBigCodeAttention:c_attn",
        _QKV,
        sizes=("embed_dim", "kv_dim", "kv_dim"),
        requires="multi_query",
    ),
    Fused(
        "GPTBigCodeAttention:c_attn",
        _QKV,
        pattern=_BY_HEAD % "num_heads",
        excludes="is_cross_attention",
    ),
    Fused(
        "(GPT2|DecisionTransformerGPT2|ImageGPT)Attention:c_attn",
        "key, value",
        requires="is_cross_attention",
    ),
    Fused("(GPT2|DecisionTransformerGPT2|ImageGPT)?Attention:c_attn", _QKV),
    Fused(
        "(Phi3|Phi4Multimodal)Attention:qkv_proj",
        _QKV,
        sizes=(
            "config.num_attention_heads*head_dim",
            "num_key_value_heads*head_dim",
            "num_key_value_heads*head_dim",
        ),
    ),
    # Four groups of query, value and key, in this order, were the cores of a TPU.
    Fused(
        "CodeGenAttention:qkv_proj",
        "query, value, key",
        pattern="(cores=4 part=3 dim) -> part (cores dim)",
    ),
    Fused("MiniMaxLightningAttention:qkv_proj", _QKV, pattern=_BY_HEAD % "num_attention_heads"),
    Fused(
        "DbrxAttention:Wqkv", _QKV, sizes=("hidden_size", *("num_key_value_heads*head_dim",) * 2)
    ),
    Fused("(ModernBertAttention|MptAttention):Wqkv", _QKV),
    Fused("Bark.*Attention:att_proj", _QKV),
    Fused("Exaone4_5_VisionAttention:qkv", _QKV, sizes=("q_dim", "kv_dim", "kv_dim")),
    Fused(".*(Vision|Blip|Mgpstr|PPOCR|Sam|Hiera|SegGpt|Timesformer|VitDet).*Attention:qkv", _QKV),
    Fused(
        "Falcon.*Attention:query_key_value",
        _QKV,
        pattern="(groups={num_kv_heads} (query={num_heads//num_kv_heads} + key=1 + value=1) dim) "
        "-> (groups query dim), (groups key dim), (groups value dim)",
        requires="new_decoder_architecture",
    ),
    Fused(
        "Falcon.*Attention:query_key_value",
        _QKV,
        sizes=("num_heads*head_dim", "head_dim", "head_dim"),
        requires="multi_query",
    ),
    Fused(
        "GPTNeoXAttention:query_key_value", _QKV, pattern=_BY_HEAD % "config.num_attention_heads"
    ),
    Fused(
        "GPTNeoXJapaneseAttention:query_key_value", _QKV, pattern=_BY_HEAD % "num_attention_heads"
    ),
    Fused(
        "(Bloom|Persimmon|Falcon).*Attention:query_key_value", _QKV, pattern=_BY_HEAD % "num_heads"
    ),
    Fused(
        "Qwen(3Next|3_5|3_5Moe|4ExpText)Attention:q_proj",
        "query, gate",
        pattern="(heads={config.num_attention_heads} (query={head_dim} + gate={head_dim})) "
        "-> (heads query), (heads gate)",
    ),
    Fused(
        "AXK2Attention:q_gate_proj",
        "query, gate",
        pattern="(heads={num_heads} (query={qk_head_dim} + gate={v_head_dim})) -> (heads query), (heads gate)",
    ),
    Fused(
        "LevitAttention:queries_keys_values",
        _QKV,
        pattern="(heads={num_attention_heads} (query={key_dim} + key={key_dim} + value)) "
        "-> (heads query), (heads key), (heads value)",
    ),
    Fused(
        "LevitAttentionSubsample:keys_values",
        "key, value",
        pattern="(heads={num_attention_heads} (key={key_dim} + value)) -> (heads key), (heads value)",
    ),
    Fused("PPDocLayout.*GlobalPointer:dense", "query, key"),
    Fused(
        "xLSTMLayer:qkv_opreact",
        "query, key, value, gate",
        sizes=("qk_dim", "qk_dim", "v_dim", "v_dim"),
    ),
    Fused("xLSTMLayer:ifgate_preact", "input gate, forget gate"),
    Fused(
        "xLSTMFeedForward:proj_up_gate_z|(Moshi|KyutaiSpeechToText)GatingMLP:fc1",
        "gate, value",
    ),
    Fused(".*GatedDeltaNet:in_proj_qkv", _QKV, sizes=("key_dim", "key_dim", "value_dim")),
    Fused(
        ".*GatedDeltaNet:in_proj_qkvz",
        "query, key, value, gate",
        pattern="(heads={num_k_heads} (query={head_k_dim} + key={head_k_dim} + value={value_dim//num_k_heads} + "
        "gate={value_dim//num_k_heads})) -> (heads query), (heads key), (heads value), (heads gate)",
    ),
    Fused(
        ".*GatedDeltaNet:in_proj_ba",
        "b, a",
        pattern="(heads={num_k_heads} part=2 dim) -> part (heads dim)",
    ),
    Fused(
        "JetMoeAttention:kv_proj|.*:to_kv",
        "key, value",
    ),
    Fused("DeepseekV4(Attention|HCACompressor):kv_proj", "shared by key and value", count=1),
    Fused("DeepseekV4(CSACompressor|Indexer):(kv|gate)_proj", "previous window, current window"),
    Fused(".*:kv_a_proj_with_mqa", "latent, rotary", sizes=("kv_lora_rank", "qk_rope_head_dim")),
    Fused(".*:kv_b_proj", "key, value", pattern=_LATENT % "num_heads"),
    Fused("(Mamba|FalconMamba|JambaMamba)Mixer:in_proj", "state, gate"),
    Fused("ZambaMambaMixer:in_proj", "state, gate", pattern="(dim part=2) -> part dim"),
    Fused(
        "(Mamba2|Bamba|FalconH1|NemotronHMamba2|GraniteMoeHybridMamba|Zamba2Mamba)(Mixer|Layer):in_proj",
        "gate, state, B, C, dt",
        sizes=(*("intermediate_size",) * 2, *("n_groups*ssm_state_size",) * 2, "num_heads"),
    ),
    Fused("Lfm[23].*ShortConv:in_proj", "B, C, state"),
    Fused("DisentangledSelfAttention:in_proj", _QKV, pattern=_BY_HEAD % "num_attention_heads"),
    Fused(
        "DbrxExpertGLU:[wv][12]",
        "one matrix an expert",
        pattern="(part={moe_num_experts} out) -> part out",
    ),
    Fused(
        "DeepseekV4Attention:o_a_proj",
        "one matrix a group",
        pattern="(part={o_a_proj.n_groups} out) -> part out",
    ),
    Fused("GptOssExperts:gate_up_proj", "gate, up", pattern="(dim part=2) -> part dim"),
    Fused(
        ".*:gate_up_proj|(Granite|JetMoe).*(MLP|MoE):input_linear",
        "gate, up",
    ),
    Fused(
        "ModernBert.*MLP:Wi|"
        "Moonshine.*DecoderMLP:fc1|"
        "Cohere2VisionMultiModalProjector:linear_1|"
        "Gemma.*LightConv1d:linear_start|"
        "Phi4MultimodalAudioGluPointWiseConv:ext_pw_conv_1d|"
        "ClvpGatedLinearUnit:proj|"
        ".*ConvolutionModule:pointwise_(conv|lin)1|"
        "GraniteSpeech.*ConvModule:up_conv|"
        ".*AdapterLayer:((residual|self_attn)_)?conv|"
        "Conv1dSubsampler:conv_layers",
        "value, gate",
    ),
    Fused("Qwen2_5_OmniAdaLayerNormZero:linear", "six modulations", count=6),
    Fused("Qwen2_5_OmniAdaLayerNormZero_Final:linear", "scale, shift"),
    Fused("EsmFold2AtomLayer:adaln_linear", "six modulations", count=6),
    Fused("Vits(PosteriorEncoder|TextEncoder):(conv_proj|project)", "mean, log variance"),
    Fused("FocalNetModulation:projection_in", "query, context, gates", pattern=_FOCAL),
    # timm: query, key and value one after another, or head by head.
    Fused(".*:qkv", _QKV, pattern=_BY_HEAD % "num_heads", requires="head_first", package="timm."),
    Fused(
        "Attention(Downsample)?:qkv",
        _QKV,
        pattern="(heads={num_heads} (query={key_dim} + key={key_dim} + value={val_dim})) "
        "-> (heads query), (heads key), (heads value)",
        requires="key_dim",
        package="timm.",
    ),
    Fused("WindowAttentionGlobal:qkv", "key, value", requires="use_global", package="timm."),
    Fused(
        "((Mask|Eva|Window|WindowMultiHead|MultiScale|MaskUnit|RelPos|Channel|Diff)?Attention(V2|2d|Cl|Rope|Global)?|"
        "XCA|MHSA|TalkingHeadAttn|CrossCovarianceAttn|LocallyGroupedAttn|FactorAttnConvRelPosEnc|(Rot)?AttentionPool2d):qkv",
        _QKV,
        package="timm.",
    ),
    Fused(
        "BottleneckAttn:qkv", _QKV, sizes=("dim_out_qk", "dim_out_qk", "dim_out_v"), package="timm."
    ),
    Fused("LambdaLayer:qkv", _QKV, sizes=("num_heads*dim_qk", "dim_qk", "dim_v"), package="timm."),
    Fused(
        "LiteMLA:qkv", _QKV, pattern="(heads part=3 dim={dim}) -> part (heads dim)", package="timm."
    ),
    Fused(
        "LinearSelfAttention:qkv_proj",
        _QKV,
        pattern="(query=1 + key={embed_dim} + value={embed_dim}) -> query, key, value",
        package="timm.",
    ),
    Fused("ConvAttention:pwise", _QKV, pattern=_BY_HEAD % "num_heads", package="timm."),
    Fused("(Attention|GPSA):qk", "query, key", package="timm."),
    Fused(
        "HaloAttn:kv",
        "key, value",
        pattern="(heads={num_heads} (key={dim_head_qk} + value={dim_head_v})) -> (heads key), (heads value)",
        package="timm.",
    ),
    Fused(
        "AttentionDownsample:kv",
        "key, value",
        pattern="(heads={num_heads} (key={key_dim} + value={val_dim})) -> (heads key), (heads value)",
        package="timm.",
    ),
    Fused("(Class|GlobalSubSample)?Att(entio)?n(PoolLatent)?:kv", "key, value", package="timm."),
    Fused(
        "GluMlp:fc1|SHMA:v_gate",
        "value, gate",
        package="timm.",
    ),
    Fused("GatedConvBlock:fc1", "gate, value", package="timm."),
    Fused(
        "SelectiveKernelAttn:fc_select",
        "one matrix a path",
        pattern="(part={num_paths} out) -> part out",
        package="timm.",
    ),
    Fused("HSMSSD:hz_proj", "state, gate", package="timm."),
    Fused("HSMSSD:BCdt_proj", "B, C, dt", package="timm."),
    Fused(
        "(Diff)?ParallelScalingBlock:in_proj",
        "mlp, query, key, value",
        pattern="(mlp + query={in_proj.in_features} + key={in_proj.in_features} + value={in_proj.in_features}) "
        "-> mlp, query, key, value",
        package="timm.",
    ),
    Fused("FocalModulation:f", "query, context, gates", pattern=_FOCAL, package="timm."),
    Fused("(GEGLU|SwiGLU):proj", "value, gate", package="diffusers."),
    # diffusers: scales, shifts and gates of norms, in equal parts.
    Fused("SD35AdaLayerNormZeroX:linear", "nine modulations", count=9, package="diffusers."),
    Fused("AdaLayerNormZeroSingle:linear", "three modulations", count=3, package="diffusers."),
    Fused("LuminaRMSNormZero:linear", "four modulations", count=4, package="diffusers."),
    Fused(
        "(AdaLayerNorm(Zero|Single)|CogVideoXLayerNormZero):linear",
        "six modulations",
        count=6,
        package="diffusers.",
    ),
    Fused("(AdaLayerNorm(Continuous)?|AdaGroupNorm):linear", "scale, shift", package="diffusers."),
    Fused("(DiT)?Transformer2DModel:proj_out_1", "shift, scale", package="diffusers."),
    Fused(
        "FusedQKVLinear:wqkv",
        _QKV,
        pattern="(groups (query={heads_per_kv} + key=1 + value=1) dim={head_dim}) "
        "-> (groups query dim), (groups key dim), (groups value dim)",
        package="torchtitan.",
    ),
    Fused(
        "Attention:wkv_a",
        "latent, rotary",
        sizes=("kv_lora_rank", "qk_rope_head_dim"),
        package="torchtitan.",
    ),
    Fused("Attention:wkv_b", "key, value", pattern=_LATENT % "n_heads", package="torchtitan."),
    Fused(
        "GptOssGroupedExperts:mlp1_weight_EGD",
        "gate, up",
        pattern="(dim part=2) -> part dim",
        package="torchtitan.",
    ),
    Fused("SelfAttention:qkv", _QKV, package="torchtitan."),
    Fused(
        "SingleStreamBlock:linear1",
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
    (
        re.compile(r"(.*_)?w?qkv(_.*)?|c_attn|query_key_value|in_proj_weight", re.IGNORECASE),
        ("q", "k", "v"),
    ),
    (re.compile(r"(.*_)?w?kv(_proj|_linear)?", re.IGNORECASE), ("k", "v")),
    (re.compile(r"(fused_)?(gate_up|up_gate)(_proj)?|w1_?w?[23]", re.IGNORECASE), ("a", "b")),
)
STORED = (
    Stored("Conv1D", "weight", TRANSPOSED),
    Stored(".*MultiModalProjector", "mm_input_projection_weight", TRANSPOSED),
    Stored(
        "XLNetRelativeAttention",
        "[qkvr]",
        "in heads dim -> (heads dim) in",
        note="heads side by side",
    ),
    Stored(
        "XLNetRelativeAttention", "o", "out heads dim -> out (heads dim)", note="heads side by side"
    ),
    Stored(
        "FunnelRelMultiheadAttention",
        "r_kernel",
        "in heads dim -> (heads dim) in",
        note="heads side by side",
    ),
    Stored("RecurrentGemmaRglru", "(input|recurrent)_gate_weight", TRANSPOSED_STACK),
    Stored("GroupedLinearLayer", "weight", TRANSPOSED_STACK),
    Stored(".*FlexibleLinear", "weight", STACK),
)
