"""Roles that the names of parameters show: a table of regular expressions, and the components that they are read in."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias

from muonfx.routing.params import plain_name
from muonfx.routing.structure import LEAVES_OF_LAYERS

Role = Literal["hidden", "embedding", "head", "vector", "other"]
"""The role of a parameter; `default_labels` describes the roles."""

Where: TypeAlias = Literal["any", "last", "layer", "tensor", "child", "path"]
"""The part of a name that a regular expression is compared with:

- "any": each component of a name, also the modules around the layer.
- "layer": the name of the layer, "fc" in ``h.fc.weight`` and in ``h.fc.0.weight``.
- "tensor": the name of a parameter that belongs to no layer, "pos_embed" in ``vit.pos_embed``.
- "last": one of these two.
- "child": the same, if it is a direct child of the model.
- "path": the whole path of a layer, "h.fc.0" in ``h.fc.0.weight``.
"""


class NameRule(NamedTuple):
    """A role, and a regular expression for the names of parameters that have this role."""

    role: Role
    where: Where
    pattern: str
    """It is searched for in words that "_" separates, in lower case: "lm_head" for ``lmHead``."""
    sibling: str | None = None
    """If set, the rule applies to models that have a child or a parameter of such a name themselves."""


_EMBED = "(embed(s|dings?|ders?)?|emb[sd]?|wte|wpe)"
_EMBEDDED = "(tokens?|tok|positions?|pos|in|state|action|return|timestep)"
_HEAD = "(head|classifier|unembed(ding|der)?|logits)"
# Words that may follow a head word at the beginning of a name: head_dist, head_linear, logits_dense.
_AFTER_HEAD = "(dist|linear|dense|proj|projection|fc|layer|conv|out|output|aux)"
# A head of attention is a part of a hidden layer: multi_head, attn_output_head, q_head.
_HEAD_OF_ATTENTION = "((attn|attention|multi)_(.*_)?|(query|key|value|[qkvo]|qk|q?kv)_)head"
_FRONT = r"\b([^.]*_)?(encoder|tower|backbone|visual|vocoder|trunk|extractor|embedder)(_\d+)*"
_END = r"(_\d+)*$"

NORM = NameRule(
    "vector", "last", rf"(^|_)(norms?|layernorm|rmsnorm|batchnorm|groupnorm|ln|bn|gn){_END}"
)
"""Norms. It decides only for named tensors without a model: else the type of the module does."""
GATE = NameRule(
    "other",
    "any",
    rf"(^|_)(moe|experts?)_(.*_)?(gate|gating){_END}|^(gate|gating|gate_network|gating_network){_END}",
)
"""Gates of a mixture of experts, or of a gated MLP, where they are hidden."""
FIRST_CONVOLUTION = NameRule(
    "other",
    "path",
    # conv1 of Whisper; encoder.stem; feature_extractor.conv_layers.0.conv of wav2vec 2.0
    rf"^(.*{_FRONT}\.(\d+\.)*)?(conv_1|conv_in|conv_pre|mel_conv|stem)$|{_FRONT}\.(.*\.)?conv_layers\.0\b",
)
"""The convolution of raw input at the front of a model: the blocks of a ResNet have such names, too."""
NAME_RULES = (
    # gate_up_proj_bias, attention_biases; mlp1_bias_EG in torchtitan; pos_bias_u in Transformer-XL
    NameRule("vector", "tensor", r"(^|_)bias(es)?(_\d+)*(_[a-z]{1,3})?$"),
    # pos_emb, embed_tokens, vision_embed_tokens_extend; rel_pos_x_bias, a layer of attention biases
    NameRule(
        "embedding",
        "last",
        rf"^(?!(.*_)?patch(_|$))(.*_)?{_EMBED}(_{_EMBEDDED})?{_END}|^{_EMBED}_{_EMBEDDED}_",
    ),
    NameRule(
        "embedding",
        "layer",
        rf"(^|_)(embedding_table|bias_table|pos_bias|bias(es)?|relative_attention_bias){_END}",
    ),
    NameRule("embedding", "path", r"\bshared$"),  # of T5 and BART
    # pos_embed, class_embedding_table; not embed_proj, which is a matrix
    NameRule("embedding", "tensor", rf"^((?!proj).)*(?<![a-z]){_EMBED}(_(?!.*proj)|$)"),
    # tables whose rows act as tokens or positions: cls_token, a Perceiver's latents, a quantizer's codebook, rel_pos_h
    NameRule(
        "embedding",
        "tensor",
        rf"(^|_)(tokens?|registers?|latents|queries|(latent|learned)_query|prompts?|codevectors|codebooks?){_END}|"
        rf"(^|_)(rpb|pe|ape|pos|positions?|encodings?|frequencies|table|bias_table){_END}|^latents_|^rel_pos_",
    ),
    # rates of state-space and RWKV layers; gains
    NameRule(
        "vector",
        "tensor",
        r"^(a_log|d|time_decay|time_first|time_faaaa)$|(^|_)(scales?|gamma|gain)(_\d+)*$",
    ),
    NORM,
    # These layers lead from the input to the rates of a state-space layer.
    NameRule("other", "last", r"^(x_proj|dt_proj)(_weight)?$"),
    # layers that embed patches of an image: to_patch_embedding, patch_embed_proj, embed_patch; x_embedder.proj
    NameRule("other", "any", rf"(^|_)(patch_(.*_)?({_EMBED}|embed_[a-z]+)|embed_patch){_END}"),
    NameRule("other", "path", r"\w*(?<![a-z])(embeds?|embedder)(_\d+)*\.proj(ection)?$"),
    NameRule(
        "other", "path", rf"\w*(?<![a-z]){_EMBED}(_\d+)*\.(\w*_)?patch_(\w*_)?proj(ection)?{_END}"
    ),
    # In diffusion transformers, these layers read the latents. A block in them may have a hidden layer of this name.
    NameRule("other", "child", "^(proj_in|preprocess_conv)$"),
    NameRule("other", "any", r"(^|_)(routers?|routing)(_|$)"),  # of a mixture of experts
    GATE,
    # lm_head, classifier_2, logits_dense, embed_out in GPT-NeoX; all layers inside them, too
    NameRule("head", "any", rf"^(?!(.*_)?{_HEAD_OF_ATTENTION}{_END})(.*_)?{_HEAD}{_END}"),
    NameRule("head", "any", rf"^{_HEAD}(_\d+)*(_{_AFTER_HEAD}(_\d+)*)+$|(^|_){_EMBED}_out{_END}"),
    NameRule(
        "head",
        "any",
        r"^(score|cls_score|output_layer|vocab_proj(ector)?|qa_outputs|seq_relationship|ctc_proj|decoder_pred"
        rf"|predict_(state|action|return)|action_out_proj|feat_out|prob_out|(final|last)_linear|lm_heads){_END}",
    ),
    # In BERT, this layer leads from features to the vocabulary.
    NameRule("head", "path", r"\bdecoder(\.output_projection)?$"),
    # Heads only as direct children of the model, as in torchtitan, ResNet and Whisper. A number above 1 marks the last
    # of several layers, such as proj_out_2 in DiT. The loss of wav2vec 2.0 compares project_hid and project_q.
    NameRule(
        "head",
        "child",
        r"^(fc|(output|out|proj_out|conv_out|conv_post|proj_out_conv)(_[2-9])?|project_(hid|q)|postprocess_conv)$",
    ),
    NameRule("head", "child", "^projector$", sibling="classifier"),
    NameRule(
        "head", "child", "^(text|visual|image|audio)_projection$", sibling="logit_scale|temperature"
    ),  # as in CLIP
)
"""The rules for names. The first one that matches decides."""

_TOPS = frozenset({"module", "model", "base_model", "net", "network"})
"""Names that a module has for the whole model in it."""


class Name:
    """The name of a parameter, and the components of it that rules are compared with.

    >>> name = Name("_orig_mod.model.lmHead.0.weight")
    >>> name.components, name.path, name.layer, name.is_of_layer
    (['model', 'lmHead', '0', 'weight'], ['lmHead', '0'], 'lmHead', True)
    >>> name.words
    {'model': 'model', 'lmHead': 'lm_head', '0': '0', 'weight': 'weight'}
    """

    def __init__(self, name: str) -> None:
        self.components = _components(name)
        """The components of the name. Components that wrappers and peft's adapters add are left out."""
        self.words = {component: words_of(component) for component in self.components}
        """The words of each component, such as "lm_head" for "lmHead", which each rule reads."""
        self.is_of_layer = self.components[-1] in LEAVES_OF_LAYERS
        """True for the weight of a layer, as ``blocks.fc.weight``, and False for ``pos_embed``."""
        self.path = _path_of_layer(self.components)
        """The components up to the layer, without the name of the model: ["blocks", "lmHead", "0"]."""
        words_in_path = [component for component in self.path if not component.isdigit()]
        self.layer = words_in_path[-1] if words_in_path else self.components[-1]
        """The name of the layer, such as "lmHead"; of a parameter without a layer, its own."""

    @property
    def child_of_model(self) -> str | None:
        """The name of the layer or parameter, if it is a direct child of the model; None if it is nested deeper.

        >>> Name("model.fc.weight").child_of_model, Name("blocks.fc.weight").child_of_model
        ('fc', None)
        """
        if len(self.path) > 1:
            return None
        return self.path[0]

    def find(self, rule: NameRule) -> str | None:
        """Return the first component that a rule matches, as it is written; None if there is none.

        A rule for the path may match several components, which are returned with the dots between them.

        >>> Name("h.0.lmHead.weight").find(NameRule("head", "any", "^lm_head$"))
        'lmHead'
        >>> Name("h.xEmbedder.proj.weight").find(NameRule("other", "path", "embedder.proj"))
        'xEmbedder.proj'
        """
        if rule.where == "path":
            return self._find_in_path(rule.pattern)
        for component in self._compared(rule.where):
            if re.search(rule.pattern, self.words[component]):
                return component
        return None

    def _find_in_path(self, pattern: str) -> str | None:
        """Return the components of the path of a layer that a pattern matches; None if there are none.

        For "embedder.proj", these are the components 1 and 2 of ``h.xEmbedder.proj``, whose words are
        "h.x_embedder.proj".
        """
        if not self.is_of_layer:
            return None
        path_in_words = ".".join([self.words[component] for component in self.path])
        match = re.search(pattern, path_in_words)
        if match is None:
            return None
        # `first` is the index of the first component of the match.
        first = path_in_words.count(".", 0, match.start())
        last = path_in_words.count(".", 0, match.end())
        return ".".join(self.path[first : last + 1])

    def _compared(self, where: Where) -> list[str]:
        """Return the components that a rule for these components is compared with."""
        if where == "any":
            return self.components
        if where == "child" and self.child_of_model is None:
            return []
        if (where == "layer" and not self.is_of_layer) or (where == "tensor" and self.is_of_layer):
            return []
        return [self.layer]


def _components(name: str) -> list[str]:
    """Split a parameter name at its dots, without the components that wrappers and peft's adapters add.

    >>> (
    ...     _components("_orig_mod.fc.base_layer.weight"),
    ...     _components("head.modules_to_save.default.weight"),
    ... )
    (['fc', 'weight'], ['head', 'weight'])
    """
    components = plain_name(name).split(".")
    # peft adds two components, as in "head.modules_to_save.default.weight", of which one is the adapter's name.
    if "modules_to_save" in components[:-1]:
        index = components.index("modules_to_save")  # this component and the next one are removed
        del components[index : index + 2]
    components = [
        component for component in components if component not in ("base_layer", "original_module")
    ]
    return components or [name]


def _path_of_layer(components: list[str]) -> list[str]:
    """Return the components up to the layer, without the name that a module around the model has for it.

    >>> _path_of_layer(["model", "blocks", "lmHead", "0", "weight"])
    ['blocks', 'lmHead', '0']
    """
    path = components
    if path[-1] in LEAVES_OF_LAYERS and len(path) > 1:
        path = path[:-1]
    while path[0] in _TOPS and len(path) > 1:
        path = path[1:]
    return path


def words_of(component: str) -> str:
    """Return the words and numbers of a component, in lower case and joined by "_".

    >>> (
    ...     words_of("embedTokens"),
    ...     words_of("lm_head"),
    ...     words_of("QKVProj"),
    ...     words_of("conv1"),
    ...     words_of("A_log"),
    ... )
    ('embed_tokens', 'lm_head', 'qkv_proj', 'conv_1', 'a_log')
    """
    # A word is either capitals that no small letter follows, as in "QKV", or small letters after at most one capital.
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", component)
    return "_".join(words).lower()
