"""Write the data of docs/routed-models.md: the labels that `default_labels` gives to popular models, and why.

It writes docs/routed-models.csv, with a row for each parameter, and docs/assets/routed-models.html, the same rows as
tables that unfold by model. The models are those of transformers, with tiny configurations, on the meta device: no
weights are created or downloaded. ``--check`` writes nothing, and fails if a file differs from the output.
"""

from __future__ import annotations

import argparse
import csv
import html
import io
import re
import sys
from pathlib import Path

import torch
import transformers
from torch import nn

import muonfx as mfx

DOCS = Path(__file__).resolve().parent.parent / "docs"
DATA, TABLES = DOCS / "routed-models.csv", DOCS / "assets" / "routed-models.html"
COLUMNS = ["parameter", "shape", "label", "matrices", "stored", "rule"]
Settings = dict[str, object]
BERT: Settings = {
    "hidden_size": 32,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
}
BERT |= {"intermediate_size": 48, "pad_token_id": 0}
TEXT: Settings = BERT | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
IMAGE: Settings = BERT | {"image_size": 8, "patch_size": 4, "num_labels": 10}
EXPERTS: Settings = TEXT | {"num_experts": 4, "moe_intermediate_size": 24}
LOCAL: Settings = TEXT | {"num_local_experts": 4}
GPT2: Settings = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 96}
DEEPSEEK: Settings = EXPERTS | {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DEEPSEEK |= {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
KIMI: Settings = DEEPSEEK | {"layer_types": ["linear_attention", "full_attention"]}
LLAMA4: Settings = LOCAL | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 2}
JAMBA: Settings = EXPERTS | {
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
    "mamba_expand": 2,
    "attn_layer_period": 2,
}
JAMBA |= {"attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
MAMBA2: Settings = {
    "hidden_size": 32,
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
}
MAMBA2 |= {"state_size": 4, "n_groups": 2}
QWEN_NEXT: Settings = EXPERTS | {"shared_expert_intermediate_size": 24, "linear_key_head_dim": 8}
QWEN_NEXT |= {"linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
QWEN_NEXT |= {"layer_types": ["linear_attention", "full_attention"]}
T5: Settings = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 1,
    "vocab_size": 96,
}
WHISPER: Settings = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "vocab_size": 96,
    "num_mel_bins": 16,
}
WHISPER |= {
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
WHISPER |= {"pad_token_id": 0}
SPEECH: Settings = BERT | {"conv_dim": (16, 16), "conv_kernel": (3, 3), "conv_stride": (2, 2)}
SPEECH |= {"num_feat_extract_layers": 2}
RESNET: Settings = {
    "embedding_size": 8,
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "num_labels": 10,
}
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
    "Bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"hidden_size": 32, "n_head": 4, "n_layer": 1, "vocab_size": 96},
    ),
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


def as_csv(models: dict[str, list[list[str]]]) -> str:
    """The rows of all models as CSV. A column that a table of `describe` does not have is empty.

    >>> print(
    ...     as_csv(
    ...         {
    ...             "M": [
    ...                 ["parameter", "shape", "label", "rule"],
    ...                 ["up.weight", "4 x 2", "muon", "hidden"],
    ...             ]
    ...         }
    ...     )
    ... )
    model,parameter,shape,label,matrices,stored,rule
    M,up.weight,4 x 2,muon,,,hidden
    <BLANKLINE>
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, ["model", *COLUMNS], restval="", lineterminator="\n")
    writer.writeheader()
    for title, (header, *table) in models.items():
        for row in table:
            writer.writerow({"model": title, **dict(zip(header, row, strict=True))})
    return file.getvalue()


def as_html(models: dict[str, list[list[str]]]) -> str:
    """A table for each model that unfolds at a click, in HTML for the site."""
    lines: list[str] = []
    for title, (header, *table) in models.items():
        # The site's style hides a header whose cells have no paragraph.
        head = "".join(f"<th><p>{name}</p></th>" for name in header)
        lines.append(f"<details><summary>{html.escape(title)}</summary>")
        lines.append('<div class="pst-scrollable-table-container"><table class="table">')
        lines.append(f"<thead><tr>{head}</tr></thead><tbody>")
        for row in table:
            cells = "".join(f"<td>{html.escape(cell, quote=False)}</td>" for cell in row)
            lines.append(f"<tr>{cells}</tr>")
        lines.append("</tbody></table></div></details>")
    lines.append(f"<p>Models of transformers {transformers.__version__}.</p>")
    return "\n".join(lines) + "\n"


def files() -> dict[Path, str]:
    """The files that this script writes, with their contents."""
    transformers.logging.set_verbosity_error()
    models = {title: rows(build(title)) for title in MODELS}
    return {DATA: as_csv(models), TABLES: as_html(models)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the files and write nothing")
    check = parser.parse_args().check
    differs = False
    for path, text in files().items():
        if check:
            differs = differs or path.read_text() != text
        else:
            path.write_text(text)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
