"""Write docs/routed-models.md: the labels that `default_labels` gives the parameters of popular models, and why.

The models are those of transformers, with tiny configurations, on the meta device: no weights are created or
downloaded. ``--check`` writes nothing, and fails if the page differs from the output of this script.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch
import transformers
from torch import nn

import muonfx as mfx

PAGE = Path(__file__).resolve().parent.parent / "docs" / "routed-models.md"
Settings = dict[str, object]
BERT: Settings = {"hidden_size": 32, "vocab_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1}
BERT |= {"intermediate_size": 48, "pad_token_id": 0}
TEXT: Settings = BERT | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
IMAGE: Settings = BERT | {"image_size": 8, "patch_size": 4, "num_labels": 10}
EXPERTS: Settings = TEXT | {"num_experts": 4, "moe_intermediate_size": 24}
LOCAL: Settings = TEXT | {"num_local_experts": 4}
GPT2: Settings = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 96}
DEEPSEEK: Settings = EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
DEEPSEEK |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
KIMI: Settings = DEEPSEEK | {"layer_types": ["linear_attention", "full_attention"]}
LLAMA4: Settings = LOCAL | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 2}
JAMBA: Settings = EXPERTS | {"mamba_d_state": 4, "mamba_dt_rank": 4, "mamba_expand": 2, "attn_layer_period": 2}
JAMBA |= {"attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
MAMBA2: Settings = {"hidden_size": 32, "vocab_size": 96, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8}
MAMBA2 |= {"state_size": 4, "n_groups": 2}
QWEN_NEXT: Settings = EXPERTS | {"shared_expert_intermediate_size": 24, "linear_key_head_dim": 8}
QWEN_NEXT |= {"linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
QWEN_NEXT |= {"layer_types": ["linear_attention", "full_attention"]}
T5: Settings = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 1, "vocab_size": 96}
WHISPER: Settings = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 96, "num_mel_bins": 16}
WHISPER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
WHISPER |= {"pad_token_id": 0}
SPEECH: Settings = BERT | {"conv_dim": (16, 16), "conv_kernel": (3, 3), "conv_stride": (2, 2)}
SPEECH |= {"num_feat_extract_layers": 2}
RESNET: Settings = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 10}
CONVNEXT: Settings = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 10}

MODELS: dict[str, tuple[str, str, Settings]] = {
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", TEXT),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", TEXT),
    "Gemma 3": ("Gemma3TextConfig", "Gemma3ForCausalLM", TEXT),
    "Phi-3": ("Phi3Config", "Phi3ForCausalLM", TEXT),
    "Qwen3-MoE": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", LOCAL),
    "DeepSeek-V3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", DEEPSEEK),
    "DeepSeek-V3.2": ("DeepseekV32Config", "DeepseekV32ForCausalLM", DEEPSEEK),
    "GLM-5": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", DEEPSEEK),
    "Kimi Linear": ("KimiLinearConfig", "KimiLinearForCausalLM", KIMI),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", LOCAL),
    "Llama 4": ("Llama4TextConfig", "Llama4ForCausalLM", LLAMA4),
    "Jamba": ("JambaConfig", "JambaForCausalLM", JAMBA),
    "Mamba-2": ("Mamba2Config", "Mamba2ForCausalLM", MAMBA2),
    "Qwen3-Next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", QWEN_NEXT),
    "GPT-NeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", BERT),
    "Falcon": ("FalconConfig", "FalconForCausalLM", BERT | {"multi_query": True}),
    "Persimmon": ("PersimmonConfig", "PersimmonForCausalLM", BERT),
    "Bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_head": 4, "n_layer": 1, "vocab_size": 96}),
    "BERT, for pretraining": ("BertConfig", "BertForPreTraining", BERT),
    "ModernBERT": ("ModernBertConfig", "ModernBertForMaskedLM", BERT),
    "T5": ("T5Config", "T5ForConditionalGeneration", T5),
    "ViT": ("ViTConfig", "ViTForImageClassification", IMAGE),
    "CLIP": ("CLIPConfig", "CLIPModel", {"text_config": BERT, "vision_config": IMAGE}),
    "Whisper": ("WhisperConfig", "WhisperForConditionalGeneration", WHISPER),
    "Wav2Vec2, for classification": ("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", SPEECH),
    "ResNet": ("ResNetConfig", "ResNetForImageClassification", RESNET),
    "ConvNeXt": ("ConvNextConfig", "ConvNextForImageClassification", CONVNEXT),
}
"""Class of the configuration, class of the model, and configuration, by title."""

HEAD = """# Models routed

The labels and matrices that `mfx.default_labels`, and therefore `mfx.Muon(model)`, chooses in models of
transformers. The models are tiny. A `#` is the number of a layer; only the first of several equal layers is
shown. Parameters with fewer than two dims use AdamW and are not shown.

`scripts/routed_models.py` writes this page (`--check` compares it), with transformers {version}.
[Routing](routing.md) explains the rules and the columns.
"""


def build(title: str) -> nn.Module:
    config, model, settings = MODELS[title]
    with torch.device("meta"):
        return getattr(transformers, model)(getattr(transformers, config)(**settings))


def rows(model: nn.Module) -> list[list[str]]:
    lines = str(mfx.describe(model)).split("\n\n")[0].splitlines()
    starts = [found.start() for found in re.finditer(r"\S+", lines[0])]
    seen: list[list[str]] = []
    for line in lines:
        cells = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        cells[0] = re.sub(r"\.\d+\.", ".#.", cells[0])
        if (not seen or " x " in cells[1]) and cells not in seen:
            seen.append(cells)
    return seen


def page() -> str:
    transformers.logging.set_verbosity_error()
    parts = [HEAD.format(version=transformers.__version__)]
    for title in MODELS:
        header, *table = rows(build(title))
        body = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *table)]
        parts.append(f"## {title}\n\n" + "\n".join(body) + "\n")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the page and write nothing")
    new = page()
    if parser.parse_args().check:
        return int(PAGE.read_text() != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
