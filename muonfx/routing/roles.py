"""The role of each parameter in a model, such as "embedding", by module type, name and shape, with a reason.

Module types decide first, if a model is given: an embedding is recognized under any name. Names decide where types are
ambiguous, since a hidden layer, an output head and a router are all ``nn.Linear``. Shapes decide the rest. A name is
split into components and their words, and never matched by substrings: ``gate`` is a router and ``gate_proj`` is not,
``embed_tokens`` is an embedding and ``embedder_proj`` is not. An ambiguous parameter is not called a hidden matrix,
because AdamW is never wrong, but may train slower.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple, TypeAlias, get_args

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from muonfx.routing.names import (
    FIRST_CONVOLUTION,
    GATE,
    NAME_RULES,
    NORM,
    Name,
    NameRule,
    Role,
    words_of,
)
from muonfx.routing.params import PLAIN_LEAVES, ParamInfo, class_name_fits, module_path
from muonfx.routing.structure import Structure, is_embedding
from muonfx.routing.views import is_convolution

ROLES: tuple[Role, ...] = get_args(Role)
"""All roles."""


GatedMlps: TypeAlias = frozenset[tuple[str, int]]
"""The path of each module with ``up`` or ``down`` matrices, and their ndim: a ``gate`` in it is not a router."""


class Decision(NamedTuple):
    """The role of a parameter (its function in the model, such as "head"), and the reason for this choice, as text."""

    role: Role
    reason: str


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
# Class names of norms in other packages: LlamaRMSNorm, LayerNorm2d, RMSNormGated. LayerNormLinear is excluded, since it
# holds a hidden matrix.
_NORM_CLASS = r"Norm(\dd|Act|Gated|[Ff][Pp]\d+)*$"

# Words in the name of a matrix that a module holds without a layer: c_fc, qkvo_w, w_gate, mm_input_projection_weight.
_MATRIX = re.compile(
    r"(^|_)(weights?|kernels?|matrix|linear|fc|dense|proj(ection)?|up|down|w?qkvo?|w?kv|[wqkvo]|"
    r"w[qkvoiug]|w(in|out|up|down))(_|$)"
)
# The word "lora", and prefixes of the factors of peft's other adapters, and of the seeds of factors.
_ADAPTER = re.compile(
    r"(^|_)lora(_|$)|^(hada_|lokr_|oft_|boft_|hra_|vera_|pvera_|randlora_|ia3_|fourierft_|waveft_|c3a_|shira_|delora_|"
    r"miss_block|gralora_|hira_|road_(theta|alpha)|vblora_|lily_|deft_[pr]$|psoft_|osf_|adamss_|glora_|tinylora_|"
    r"unilora_|frod_|peanut_|supertuning_|poly_|adaption_prompt|bone_|shadow_(down|up|update))"
)
_IMAGE_CHANNELS = 3
_FEW_FEATURES = 4  # such as the coordinates of a box, or four frames of a game
# The least ratio of the long side to the short side for a map from or to few features.
_MANY_TIMES_WIDER = 32


class _Model(NamedTuple):
    """A model, as far as the role of one of its parameters depends on the others."""

    names: frozenset[str]
    """The names of all parameters."""
    children: frozenset[str]
    """The names of the layers and parameters that are direct children of the model, such as "classifier"."""
    gated_mlps: GatedMlps
    """The paths of modules in which a ``gate`` is not a router, with the ndim of their matrices."""
    projections: frozenset[str]
    """The names of weights of queries, keys and values."""
    structure: Structure
    """The structure of the model; it is empty if only names and shapes are known."""


def roles_of(infos: Sequence[ParamInfo], structure: Structure) -> dict[str, Decision]:
    """Return a dict from parameter name to its role (the function in the model, such as "head") and the reason.

    ``structure`` is the structure of the model; it is empty if only names and shapes are known.
    """
    # The role of a parameter also depends on the others: a "gate" next to an "up" is no router. This is collected
    # first.
    names = [info.name for info in infos]
    children: set[str] = set()
    for name in names:
        child = Name(name).child_of_model
        if child is not None:
            children.add(child)
    model = _Model(
        names=frozenset(names),
        children=frozenset(children),
        gated_mlps=_gated_mlps(infos),
        projections=_projections_of_attention(infos),
        structure=structure,
    )
    return {info.name: _role(info, model) for info in infos}


def _role(info: ParamInfo, model: _Model) -> Decision:
    """Return the role of a parameter by the first rule that decides: by type, dims, name, shape or structure.

    ``wte.weight`` of an ``nn.Embedding`` is an embedding by its type, and ``blocks.0.fc.weight`` is a hidden matrix,
    since no rule recognizes it. The docstring of `default_labels` describes the rules for users.
    """
    # Each function returns None if it does not recognize the parameter; then ``or`` calls the next one.
    decision = _by_part(info, model) or _by_type(info) or _by_adapter(info)
    if decision is not None:
        return decision
    if info.ndim < 2:
        return Decision("vector", f"{info.ndim}-D")
    return (
        _by_name(info, model)
        or _by_shape(info, model)
        or _without_layer(info, model)
        or _first_or_last_layer(info, model)
        or _first_convolution(
            info, is_read=module_path(info.name) in model.structure.read_in_their_block
        )
        or Decision("hidden", f"hidden matrix ({info.ndim}-D)")
    )


def _by_type(info: ParamInfo) -> Decision | None:
    """Return the decision by the types of the modules that own the tensor: an embedding, a norm, or None.

    A tensor that several modules own is an embedding if one of them is an embedding.

    >>> _by_type(ParamInfo("wte.weight", (9, 4), module=nn.Embedding)).reason
    'embedding (module type Embedding)'
    """
    # 1. Embeddings, in a loop of their own: a tensor of an nn.Linear and an nn.Embedding is an embedding.
    for module in info.modules:
        if is_embedding(module):
            tied = f", tied with {info.tied[0]!r}" if info.tied else ""
            return Decision("embedding", f"embedding (module type {module.__name__}{tied})")
    # 2. Norms.
    for module in info.modules:
        # A layer such as LayerNormLinear holds a norm and a hidden matrix.
        is_norm = issubclass(module, _NORMS) or class_name_fits(module, _NORM_CLASS)
        if is_norm and not issubclass(module, nn.Linear | _ConvNd):
            return Decision("vector", f"norm (module type {module.__name__})")
    return None


def _by_adapter(info: ParamInfo) -> Decision | None:
    """Return the decision for a factor of an adapter, such as ``lora_A``; None for another parameter.

    An adapter trains a small addition to a frozen weight. The addition is the product of two factors, so that neither
    is a hidden matrix itself.

    >>> _by_adapter(ParamInfo("fc.lora_A.weight", (8, 64)))
    Decision(role='other', reason="low-rank factor (name component 'lora_A')")
    """
    role: Role = "other"
    if info.ndim < 2:
        role = "vector"
    for name in info.names:  # also the other names of a tied tensor
        for component in name.split("."):  # "fc", "lora_A" and "weight"
            # The word is also in loraA, downLora and lora1.
            has_word_lora = "lora" in words_of(component).split("_")
            if has_word_lora or _ADAPTER.search(component.lower()):
                return Decision(role, f"low-rank factor (name component {component!r})")
    return None


def _without_layer(info: ParamInfo, model: _Model) -> Decision | None:
    """Return the decision for a 2-D parameter that a module holds without a layer; None for others.

    It is a table of vectors, such as ``self.pos_embed = nn.Parameter(...)``, or a projection of the outputs, such as
    ``visual.proj`` of CLIP. Some modules hold their hidden matrices so, too: a parameter with the name of a matrix,
    such as ``c_fc``, is neither.
    """
    names_in_modules = {info.name, *info.tied}
    if info.ndim != 2 or names_in_modules.isdisjoint(model.structure.held_by_no_layer):
        return None
    owner = info.modules[0].__name__
    if not names_in_modules.isdisjoint(model.structure.last_projections):
        return Decision("head", f"projection (a 2-D parameter of {owner}, outside of all blocks)")
    if _is_named_as_a_matrix(Name(info.name).layer):
        return None
    return Decision("embedding", f"table (a 2-D parameter of {owner}, not the weight of a layer)")


def _first_or_last_layer(info: ParamInfo, model: _Model) -> Decision | None:
    """Return the decision for a first or last layer of a model, which its structure shows; None for other layers.

    The structure was found by the widths of layers. A first layer reads a width that no earlier layer returns, such as
    768 pixels of a patch. A last layer returns a width that no layer reads, such as 1000 classes.
    """
    # Queries and keys meet in a product, so that no layer reads them.
    if info.name in model.projections:
        return None
    for name in (info.name, *info.tied):  # a tied tensor is in several layers
        path = module_path(name)  # the path of the layer
        if path in model.structure.inputs:
            width = model.structure.inputs[path].reads
            return Decision(
                "other", f"raw input (no earlier layer returns the {width} features that it reads)"
            )
        if path in model.structure.heads:
            width = model.structure.heads[path].returns
            return Decision(
                "head", f"last layer (no other layer reads the {width} features that it returns)"
            )
    return None


def _is_named_as_a_matrix(leaf: str) -> bool:
    """Return True for the name of a matrix that a module multiplies by, as against a table of vectors.

    >>> (
    ...     _is_named_as_a_matrix("c_fc"),
    ...     _is_named_as_a_matrix("w_q"),
    ...     _is_named_as_a_matrix("pos_embed"),
    ... )
    (True, True, False)
    """
    if leaf in PLAIN_LEAVES:  # the module is no linear layer, so the plain name shows nothing
        return False
    return _MATRIX.search(words_of(leaf)) is not None


def _by_part(info: ParamInfo, model: _Model) -> Decision | None:
    """Return the decision for a part of a weight, such as its length with weight norm; None for another parameter.

    Weight norm stores a weight as its length ``fc.weight_g`` and its direction ``fc.weight_v``. A parametrization,
    which computes a weight from other tensors, stores them as ``fc.parametrizations.weight.original0`` and so on.
    """
    leaf = info.name.rpartition(".")[2]
    module = info.name.removesuffix(leaf)  # with a dot at the end
    # Both parts must be there: a "weight_g" alone is an ordinary name.
    has_weight_norm = {f"{module}weight_g", f"{module}weight_v"} <= model.names
    is_length_or_direction = leaf in ("weight_g", "weight_v") and has_weight_norm
    if is_length_or_direction or leaf in ("original0", "original1"):
        return Decision("other", f"part of a parametrized weight (name component {leaf!r})")
    return None


def _by_name(info: ParamInfo, model: _Model) -> Decision | None:
    """Return the decision by the names of a tensor, of which a tied tensor has several; None if none is recognized.

    The first name that is recognized decides. Only the name of an embedding precedes all others: a tensor that is both
    ``lm_head.weight`` and ``wte.weight`` is an embedding.
    """
    first_decision: Decision | None = None
    for name in info.names:  # such as "lm_head.weight" and "wte.weight"
        decision = _by_one_name(name, info, model)
        if decision and decision.role == "embedding":
            return decision
        if first_decision is None:
            first_decision = decision
    return first_decision


def _by_one_name(full_name: str, info: ParamInfo, model: _Model) -> Decision | None:
    """Return the decision by one name of a tensor, such as "head" for ``lm_head.weight``; None for an ordinary name."""
    name = Name(full_name)
    for rule in NAME_RULES:
        component = name.find(rule)
        if component is None or not _applies(rule, model):
            continue
        # The type of the module has shown that it is no norm.
        if rule is NORM and info.module is not None:
            continue
        if rule is GATE and _is_in_gated_mlp(name, component, info.ndim, model.gated_mlps):
            continue
        # A layer is hidden in spite of its name, or of a module around it, if another layer of its block reads it.
        if rule.role == "head" and module_path(full_name) in model.structure.read_in_their_block:
            continue
        return Decision(rule.role, f"name component {component!r}")
    return None


def _applies(rule: NameRule, model: _Model) -> bool:
    """Return True unless a rule requires another child of the model, such as "classifier", that the model lacks."""
    if rule.sibling is None:
        return True
    return any(re.fullmatch(rule.sibling, child) for child in model.children)


def _is_in_gated_mlp(name: Name, gate: str, ndim: int, gated_mlps: GatedMlps) -> bool:
    """Return True if a layer called "gate" is a part of a gated MLP, and not a router of experts.

    It is inside an expert, as ``experts.0.gate``, or in a module that also has ``up`` or ``down``, as ``gated_mlps``
    has them. ``ndim`` is the number of dims of the parameter.

    >>> _is_in_gated_mlp(Name("mlp.gate.weight"), "gate", 2, frozenset({("mlp", 2)}))
    True
    """
    modules_around = name.components[: name.components.index(gate)]
    for module in modules_around:
        if re.search(r"(^|_)experts?(_\d+)*$", name.words[module]):
            return True
    path_of_mlp = ".".join(modules_around)
    return (path_of_mlp, ndim) in gated_mlps


def _gated_mlps(infos: Iterable[ParamInfo]) -> GatedMlps:
    """Return the modules that contain layers called ``up`` or ``down``: in them, a layer ``gate`` is no router.

    Each is a pair of its path and the number of dims of these matrices. A gated MLP multiplies the outputs of ``gate``
    and ``up``, so that both are hidden layers. A ``gate`` elsewhere is a router of experts.

    >>> _gated_mlps([ParamInfo("mlp.up.weight", (64, 8))])
    frozenset({('mlp', 2)})
    """
    mlps: set[tuple[str, int]] = set()
    for info in infos:
        for name in info.names:
            layer = Name(name)
            for index, component in enumerate(layer.components):
                if re.search(r"(^|_)(up|down)(_|$)", layer.words[component]):
                    path_of_mlp = ".".join(layer.components[:index])  # the module around "up"
                    mlps.add((path_of_mlp, info.ndim))
    return frozenset(mlps)


def _projections_of_attention(infos: Iterable[ParamInfo]) -> frozenset[str]:
    """Return the names of weights of queries, keys and values, of which a module has at least two.

    A single ``value.weight`` may also be a head, which predicts the value of a state.

    >>> shape = (8, 8)
    >>> infos = [
    ...     ParamInfo("attn.q.weight", shape),
    ...     ParamInfo("attn.k.weight", shape),
    ...     ParamInfo("value.weight", shape),
    ... ]
    >>> sorted(_projections_of_attention(infos))
    ['attn.k.weight', 'attn.q.weight']
    >>> _projections_of_attention([ParamInfo("q.q.weight", shape), ParamInfo("k.k.weight", shape)])
    frozenset()
    """
    # The path of the module around each projection, "attn" for "attn.query.weight".
    module_of: dict[str, str] = {}
    for info in infos:
        if info.ndim < 2:  # a bias
            continue
        name = Name(info.name)
        if re.search(r"(^|_)(query|key|value|[qkvo]|qk|q?kv)(_|$)", words_of(name.layer)):
            module_around = name.components[:]
            # Remove components from the end, because a module around the layer may have the same name, as in
            # "q.q.weight".
            while module_around[-1] != name.layer:  # "weight" and numbers
                module_around.pop()
            module_around.pop()  # the layer
            module_of[info.name] = ".".join(module_around)
    counts = Counter(module_of.values())  # how many projections a module has
    return frozenset({name for name, module in module_of.items() if counts[module] > 1})


def _by_shape(info: ParamInfo, model: _Model) -> Decision | None:
    """Return the decision for a shape without a matrix to orthogonalize, such as (64, 1); None if there is a matrix.

    Such shapes are (64, 1), a vector; (64, 1, 3, 3), the vectors of a depthwise convolution; (4, 256), a layer from or
    to few features; and (64, 3, 7, 7), a convolution of an image.
    """
    rows = info.shape[0]
    columns = prod(info.shape[1:])  # more dims are flattened
    if rows == 1 or columns == 1:
        return Decision("vector", "a side of 1: a vector")
    if info.ndim == 2:
        return _by_few_features(info.shape)
    # More than two dims: a convolution. The layer is None if it has groups, or is not known.
    ungrouped_layer = model.structure.without_groups.get(module_path(info.name))
    # A depthwise convolution reads one channel in each of its groups. One without groups reads gray images.
    reads_one_channel = info.shape[1] == 1
    if reads_one_channel and ungrouped_layer is None:
        return Decision("vector", "depthwise: one vector a channel")
    # Three channels are an image. A layer outside of all blocks may also read a stack of frames.
    few = _IMAGE_CHANNELS
    if ungrouped_layer is not None and ungrouped_layer.block is None:
        few = _FEW_FEATURES
    return _by_few_channels(info, few)


def _by_few_features(shape: tuple[int, ...]) -> Decision | None:
    """Return the decision for a matrix from or to few features, such as the coordinates of a box: (4, 256).

    >>> _by_few_features((4, 256)).reason
    'from or to 4 features'
    """
    short, long = sorted(shape)
    if 0 < short <= _FEW_FEATURES and long >= _MANY_TIMES_WIDER * short:
        return Decision("other", f"from or to {short} features")
    return None


def _by_few_channels(info: ParamInfo, few: int) -> Decision | None:
    """Return the decision for a convolution from or to few channels, which reads or returns an image; else None.

    >>> _by_few_channels(ParamInfo("conv.weight", (64, 3, 7, 7)), few=3).reason
    'convolution from or to 3 channels'
    """
    # Without a module type, a tensor of three dims may as well be a stack of matrices.
    may_be_stack = info.module is None and info.ndim == 3
    short = min(info.shape[:2])
    if short > few or may_be_stack or not is_convolution(info):
        return None
    channels = "one channel" if short == 1 else f"{short} channels"
    return Decision("other", f"convolution from or to {channels}")


def _first_convolution(info: ParamInfo, *, is_read: bool) -> Decision | None:
    """Return the decision if the name belongs to the convolution of the raw input, such as ``conv1.weight``; or None.

    The layer must be a direct child of the model, or of its front part, as in ``vision_tower.conv1.weight``. A layer
    called "conv1" is also in each block of a ResNet, where it is hidden. ``is_read`` is True if another layer of its
    block reads its outputs, which shows such a layer under any path, also ``backbone.4.0.conv1``.

    >>> _first_convolution(ParamInfo("conv1.weight", (64, 12, 7, 7)), is_read=False).role
    'other'
    >>> _first_convolution(
    ...     ParamInfo("layer1.0.conv1.weight", (64, 64, 3, 3)), is_read=False
    ... )  # None
    """
    if is_read or not is_convolution(info):
        return None
    for name in info.names:
        component = Name(name).find(FIRST_CONVOLUTION)
        if component is not None:
            return Decision("other", f"convolution of the input (name component {component!r})")
    return None
