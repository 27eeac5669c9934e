"""Read the structure of a model: its layers in the order of definition, its blocks, its first and its last layers.

A module has no record of the order in which its layers run. The order of definition, the widths that layers read and
return, and the lists of blocks are known without running the model:

- A *layer* is a linear layer or a convolution. It reads vectors of one width, and returns vectors of another width.
- A *block* is a module with children in an ``nn.ModuleList`` or in an ``nn.ModuleDict`` with numbers as keys, or one of
  several such modules of the same class in an ``nn.Sequential``. Blocks are the body of a model. An ``nn.Sequential``
  whose last layer returns what no other layer reads is no block, but one of several heads.
- An *input* is a layer outside all blocks, if no earlier layer returns what it reads, whole or concatenated.
- A *head* is a layer outside all blocks whose outputs no other layer reads, whole or in parts. Before the blocks, a
  layer that returns a multiple of the width that it reads may also be a fused projection: it is only a possible head.
- A layer is *read in parts* if a later layer reads a half or a third of its outputs, and no layer or norm in the module
  around both reads the whole: the layer returns several vectors, such as the two of a gated linear unit.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from muonfx.routing.expert_stacks import COUNTS_OF_PARTS
from muonfx.routing.params import PLAIN_LEAVES, class_name_fits, joined
from muonfx.routing.views import MOST_PARTS, is_modulation

# The attributes for the width that a layer reads and the width that it returns: nn.Linear, convolutions, the Conv1D of
# transformers, and the parallel linear layers of Megatron.
_WIDTHS = (
    ("in_features", "out_features"),
    ("in_channels", "out_channels"),
    ("nx", "nf"),
    ("input_size", "output_size"),
)
# Class names in other packages: VocabParallelEmbedding, Embedding4bit.
_EMBEDDING_CLASS = r"Embedding(s|Bag|\d+bit|NF4|FP4)?$"
_LAYER_CLASS = r"Linear|Conv|Dense|Proj|Expert|MatMul"
LEAVES_OF_LAYERS = PLAIN_LEAVES | {"weight_v"}
_GAINS = frozenset({"weight", "gamma", "gain", "scale", "g"})
"""Names of the vector by which a norm multiplies."""
# The frequencies that a speech encoder flattens, or the 4 x 4 pixels that a connector merges.
_MOST_CONCATENATED = 32


class Layer(NamedTuple):
    """A linear layer, a convolution, an embedding or a norm, by its path in the model, such as "blocks.0.fc"."""

    path: str
    reads: int
    """The width of the vectors that it reads; 0 for an embedding, which reads indices."""
    returns: int
    """The width of the vectors that it returns; 0 for a norm."""
    block: str | None = None
    """The path of the outermost block that contains it, such as "blocks.0"; None outside all blocks."""
    is_grouped: bool = False
    """True for a convolution with groups, such as a depthwise convolution."""


class Structure(NamedTuple):
    """The inputs, heads and tables of a model; the docstring of this file explains the terms."""

    held_by_no_layer: frozenset[str] = frozenset()
    """The names of parameters that are not the weight of a layer, as ``self.pos = nn.Parameter(...)``."""
    last_projections: frozenset[str] = frozenset()
    """The names of those that are called a projection, and are outside of all blocks, as ``visual.proj`` of CLIP."""
    inputs: Mapping[str, Layer] = {}
    """The inputs by path."""
    heads: Mapping[str, Layer] = {}
    """The heads by path."""
    read_in_their_block: frozenset[str] = frozenset()
    """The paths of layers in blocks whose outputs another layer of the same block reads: hidden under any name."""
    possible_heads: frozenset[str] = frozenset()
    """The paths of layers that may be heads: the widths alone do not show whether they are heads or hidden."""
    read_in_parts: Mapping[str, int] = {}
    """The number of vectors that a layer returns, 2 or 3, for the path of each layer that is read in parts."""
    without_groups: Mapping[str, Layer] = {}
    """The layers without groups by path: the shape of a convolution shows how many channels it reads."""


def structure_of(model: object) -> Structure:
    """Return which layers of a model are its first and its last ones, and other facts that the widths of layers show.

    The widths are read from the modules that the model defines. The model is not run. Named tensors without a model
    have an empty structure.

    >>> block = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    >>> parts = {
    ...     "embed": nn.Linear(3, 8),
    ...     "blocks": nn.ModuleList([block]),
    ...     "head": nn.Linear(8, 5),
    ... }
    >>> structure = structure_of(nn.ModuleDict(parts))
    >>> list(structure.inputs), list(structure.heads)
    (['embed'], ['head'])
    """
    if not isinstance(model, nn.Module):
        return Structure()
    modules = _modules_of(model)
    layers = modules.layers
    has_blocks = any(layer.block is not None for layer in layers)
    if has_blocks:  # the repeated modules of the body: inputs and heads are outside of them
        inputs = _inputs(modules)
        heads, possible_heads = _heads(modules, inputs)
    else:  # nothing shows which layers are the first and the last
        inputs = {}
        heads = {}
        possible_heads = _possible_heads_without_blocks(modules)
    held_by_no_layer = frozenset(_held_by_no_layer(model))
    return Structure(
        held_by_no_layer=held_by_no_layer,
        last_projections=frozenset(_last_projections(held_by_no_layer, modules.blocks)),
        inputs=inputs,
        heads=heads,
        read_in_their_block=_read_in_their_block(layers),
        possible_heads=frozenset(possible_heads),
        read_in_parts=_read_in_parts(modules),
        without_groups={layer.path: layer for layer in layers if not layer.is_grouped},
    )


class _Modules(NamedTuple):
    """The modules of a model that show its structure, in the order of definition."""

    layers: list[Layer]
    norms: list[Layer]
    blocks: Set[str] = frozenset()
    """The paths of the blocks, the repeated modules of the body."""

    @property
    def read_widths(self) -> set[int]:
        """The widths that some layer or norm reads."""
        return {layer.reads for layer in (*self.layers, *self.norms)}


def _modules_of(model: nn.Module) -> _Modules:
    """Return the layers and the norms of a model, each with the block that contains it.

    Any other module with a gain, a vector called "weight" or "scale", for example, counts as a norm, which reads as
    many features as the gain has. Other vectors may follow an output head: the bias of a graph convolution, the
    "log_std" of a policy, and a scale of logits.

    >>> modules = _modules_of(nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 64), nn.LayerNorm(64)))
    >>> [(layer.path, layer.reads, layer.returns) for layer in (*modules.layers, *modules.norms)]
    [('0', 0, 8), ('1', 8, 64), ('2', 64, 0)]
    """
    modules = _Modules([], [])
    for path, module in model.named_modules():
        # 1. A linear layer or a convolution. Its bias is no norm.
        widths = _widths_of(module)
        if widths is not None:
            reads, returns = widths
            is_grouped = getattr(module, "groups", 1) != 1
            modules.layers.append(Layer(path, reads, returns, is_grouped=is_grouped))
            continue
        # 2. An embedding, which reads no features.
        if is_embedding(type(module)):
            width = getattr(module, "embedding_dim", None)
            if isinstance(width, int):
                modules.layers.append(Layer(path, 0, width))
        # 3. The gains of norms.
        for name, param in module.named_parameters(recurse=False):
            is_of_logits = "logit" in path
            if param.ndim == 1 and name in _GAINS and not is_of_logits:
                modules.norms.append(Layer(path, param.shape[0], 0))
    # The widths show which modules are blocks. Only then, the block around each layer is known.
    blocks = set(_blocks_of(model, modules))
    return _Modules(
        _with_blocks(modules.layers, blocks), _with_blocks(modules.norms, blocks), blocks
    )


def _with_blocks(layers: Iterable[Layer], blocks: set[str]) -> list[Layer]:
    """Return layers with the path of the outermost block that contains each; ``blocks`` are the paths of all blocks.

    >>> _with_blocks([Layer("h.0.attn.1.fc", 8, 8)], {"h.0", "h.0.attn.1"})[0].block
    'h.0'
    """
    layers_with_blocks: list[Layer] = []
    for layer in layers:
        block: str | None = None
        for ancestor in _with_ancestors(layer.path):  # the outermost first
            if ancestor in blocks:
                block = ancestor
                break
        layers_with_blocks.append(layer._replace(block=block))
    return layers_with_blocks


def _possible_heads_without_blocks(modules: _Modules) -> set[str]:
    """Return the paths of layers that may be output heads, in a model without repeated modules (blocks).

    They are the last layer, and each layer whose outputs no other layer or norm reads, judged by equal widths. A model
    that ends in an embedding, or that is a single layer, has none.

    >>> layers = [Layer("fc1", 8, 16), Layer("fc2", 16, 8), Layer("out", 8, 5)]
    >>> _possible_heads_without_blocks(_Modules(layers, norms=[]))
    {'out'}
    """
    layers = modules.layers
    if not layers:
        return set()
    last = layers[-1]
    is_embedding_last = last.reads == 0
    is_whole_model = last.path == ""
    if is_embedding_last or is_whole_model:
        return set()
    widths_of_norms = {norm.reads for norm in modules.norms}
    possible_heads = {last.path}
    for layer in layers:
        is_read_by_norm = layer.returns in widths_of_norms
        if layer.reads and not is_read_by_norm and not _is_read(layer, layers):
            possible_heads.add(layer.path)
    return possible_heads


def _is_read(layer: Layer, layers: Sequence[Layer]) -> bool:
    """Return True if the widths allow that another of the ``layers`` reads the outputs of a layer: then it is no head.

    For a layer that returns 48 features, a reader is a layer that reads 48, the whole; 24 or 16, a half or a third, as
    in a gated MLP; or 96, several such vectors concatenated or flattened, if it is defined after the layer, and no
    layer returns 96 features.

    >>> layers = [Layer("fc1", 8, 48), Layer("fc2", 24, 5)]
    >>> _is_read(layers[0], layers), _is_read(layers[1], layers)
    (True, False)
    """
    index = layers.index(layer)
    returned_widths = {other.returns for other in layers}
    for reader in (*layers[:index], *layers[index + 1 :]):
        if layer.returns in (reader.reads, 2 * reader.reads, 3 * reader.reads):
            return True
    for reader in layers[index + 1 :]:
        if (
            reader.reads
            and reader.reads not in returned_widths
            and reader.reads % layer.returns == 0
        ):
            return True
    return False


# Modules whose parameters are matrices under names of their own, or parts of one in the module around them.
_HOLDERS_OF_MATRICES = (
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    parametrize.ParametrizationList,
)


def _held_by_no_layer(model: nn.Module) -> Iterator[str]:
    """Yield the names of parameters that are not the weight of a linear layer or a convolution.

    Of these, a 2-D parameter such as ``self.pos_embed = nn.Parameter(...)`` is a table of vectors, and no matrix that
    multiplies features.

    >>> list(_held_by_no_layer(nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 4))))
    ['0.weight', '1.bias']
    """
    for path, module in model.named_modules(remove_duplicate=False):
        # All parameters of such a module, as of nn.LSTM, count as held by a layer.
        if isinstance(module, _HOLDERS_OF_MATRICES):
            continue
        # So do the tensors of a list that is given in place of a model, because nothing shows what they are.
        if module is model and isinstance(model, nn.ParameterList | nn.ParameterDict):
            continue
        is_layer = _is_layer(module)
        # A leaf: the last component of a name.
        for leaf, _ in module.named_parameters(recurse=False):
            is_weight_of_layer = is_layer and leaf in LEAVES_OF_LAYERS  # such as "weight"
            if not is_weight_of_layer:
                yield joined(path, leaf)


_PROJECTION = re.compile(r"((text|image|vision|visual|audio)_)?proj(ection)?")


def _last_projections(held_by_no_layer: Iterable[str], blocks: Set[str]) -> Iterator[str]:
    """Yield the names of parameters that project the outputs of a body, as ``visual.proj`` and ``text_projection``.

    They are called a projection, and are outside of all blocks. A model without blocks does not show which they are.

    >>> list(_last_projections(["visual.proj", "h.0.proj", "pos_embed"], blocks={"h.0", "h.1"}))
    ['visual.proj']
    """
    if not blocks:
        return
    for name in held_by_no_layer:
        path, _, leaf = name.rpartition(".")
        is_in_block = not blocks.isdisjoint(_with_ancestors(path))
        if _PROJECTION.fullmatch(leaf) and not is_in_block:
            yield name


def _is_layer(module: nn.Module) -> bool:
    """Return True if a module is a linear layer or a convolution, judged by its widths, class name or bias.

    >>> _is_layer(nn.Linear(8, 4)), _is_layer(nn.ReLU())
    (True, False)
    """
    if _widths_of(module) is not None or class_name_fits(type(module), _LAYER_CLASS):
        return True
    # Any other module with a weight and a bias counts, too. So does a norm, whose weight is a vector and no table.
    return {"weight", "bias"} <= _leaves_of(module)


def _leaves_of(module: nn.Module) -> set[str]:
    """Return the names of the parameters that a module itself has, not the modules in it: "weight" and "bias"."""
    return {name for name, _ in module.named_parameters(recurse=False)}


def is_embedding(module: type) -> bool:
    """Return True for the class of an embedding, judged by its type or its name."""
    return issubclass(module, nn.Embedding | nn.EmbeddingBag) or class_name_fits(
        module, _EMBEDDING_CLASS
    )


def _widths_of(module: nn.Module) -> tuple[int, int] | None:
    """Return the widths that a linear layer or a convolution reads and returns: ``(in_features, out_features)``.

    The result is None for a module without such attributes or without a weight.

    >>> _widths_of(nn.Linear(8, 16)), _widths_of(nn.Conv2d(3, 64, 7)), _widths_of(nn.LayerNorm(8))
    ((8, 16), (3, 64), None)
    """
    has_weight = not _leaves_of(module).isdisjoint(LEAVES_OF_LAYERS)
    # A parametrized weight is no parameter of the module, but is computed from parameters of the parametrization.
    if not has_weight and not parametrize.is_parametrized(module):
        return None
    # The names of the two attributes differ between packages: also (in_channels, out_channels), (nx, nf).
    for reads_name, returns_name in _WIDTHS:
        reads = getattr(module, reads_name, None)
        returns = getattr(module, returns_name, None)
        if isinstance(reads, int) and isinstance(returns, int):
            return reads, returns
    return None


def _blocks_of(model: nn.Module, modules: _Modules) -> Iterator[str]:
    """Yield the paths of blocks, the repeated modules that are the body of a model.

    A block is a module of several layers in an ``nn.ModuleList``, in an ``nn.ModuleDict`` with numbers as keys (as in
    torchtitan), or one of several of the same class in an ``nn.Sequential``. Some models have a list of output heads,
    too. These are no blocks: each is an ``nn.Sequential`` whose last layer returns a width that no layer or norm reads.

    >>> body = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))])
    >>> layers = [Layer("0.0", 8, 8), Layer("1.0", 8, 8)]
    >>> list(_blocks_of(body, _Modules(layers, norms=[])))
    ['0', '1']
    """
    read_widths = modules.read_widths
    for path, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) or _is_numbered_dict(module)
        if not is_list and not isinstance(module, nn.Sequential):
            continue
        # The children that have children of their own, such as a transformer's layers; nn.Linear has none.
        children = {name: child for name, child in module.named_children() if any(child.children())}
        count_of_class = Counter(map(type, children.values()))
        for name, child in children.items():
            # An nn.Sequential may also be a chain of different parts. A list is written for repeated modules.
            is_single_part = not is_list and count_of_class[type(child)] == 1
            is_head = type(child) is nn.Sequential and _last_width(child) not in read_widths
            if not is_single_part and not is_head:
                yield joined(path, name)


def _is_numbered_dict(module: nn.Module) -> bool:
    """Return True for an ``nn.ModuleDict`` with numbers as keys, which is used as a list of blocks with gaps.

    >>> _is_numbered_dict(nn.ModuleDict({"3": nn.Linear(8, 8)}))
    True
    >>> _is_numbered_dict(nn.ModuleDict({"fc": nn.Linear(8, 8)}))
    False
    """
    if not isinstance(module, nn.ModuleDict):
        return False
    return all(map(str.isdigit, module))


def _last_width(module: nn.Module) -> int:
    """Return the width that the last layer in a module returns, if its layers run in their order; 0 without layers.

    >>> _last_width(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 7)))
    7
    """
    last_width = 0
    for child in module.modules():
        widths = _widths_of(child)
        if widths is not None:
            _, last_width = widths
    return last_width


def _with_ancestors(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a module, the outermost first, and in the end the path of the module.

    >>> list(_with_ancestors("blocks.0.fc"))
    ['', 'blocks', 'blocks.0', 'blocks.0.fc']
    """
    yield ""  # the model
    ancestor = ""
    for name in path.split("."):
        ancestor = joined(ancestor, name)
        if ancestor:  # the path "" of the model itself was already given
            yield ancestor


def _inputs(modules: _Modules) -> dict[str, Layer]:
    """Return the layers that read the raw input of a model, by path.

    Such a layer is outside all blocks, the repeated modules of the body, and reads features that no earlier layer
    returns. A model may define it after its blocks, as the layer that reads the state of a robot next to images.

    >>> layers = [
    ...     Layer("embed", 3, 8),
    ...     Layer("h.0.fc", 8, 8, block="h.0"),
    ...     Layer("state", 7, 8),
    ...     Layer("head", 8, 5),
    ... ]
    >>> list(_inputs(_Modules(layers, norms=[])))
    ['embed', 'state']
    """
    part_counts = _read_in_parts(modules)  # {"mlp.fc1": 2} for a layer that returns two vectors
    inputs: dict[str, Layer] = {}
    # How many features the earlier layers return, for a later layer to read.
    earlier_widths: set[int] = set()
    for layer in modules.layers:
        is_outside_blocks = layer.block is None
        if is_outside_blocks and _reads_raw_input(layer, earlier_widths):
            inputs[layer.path] = layer
        earlier_widths.add(layer.returns)
        # A later layer may read one of the vectors, as in a gated MLP.
        if layer.path in part_counts:
            earlier_widths.add(layer.returns // part_counts[layer.path])
    return inputs


def _reads_raw_input(layer: Layer, earlier_widths: Iterable[int]) -> bool:
    """Return True if a layer reads features that no earlier layer returns, so that it reads the input of the model.

    ``earlier_widths`` are the numbers of features that the earlier layers return. If one of them is 64, a layer of 64,
    96 (a vector and half of another) or 128 features may read its outputs, one or several concatenated. Nor does a
    layer read raw input if it returns as many features as it reads, since such a layer is between others.

    >>> (
    ...     _reads_raw_input(Layer("patch", 768, 64), [64]),
    ...     _reads_raw_input(Layer("patch", 100, 64), [64]),
    ... )
    (False, True)
    """
    if not layer.reads or layer.reads == layer.returns:
        return False
    for width in earlier_widths:
        # 768 = 12 x 64 may be 12 concatenated vectors, and 96 = 1.5 x 64 one and a half. 100 features cannot be.
        reads_whole_halves = (2 * layer.reads) % width == 0
        if reads_whole_halves and width <= layer.reads <= _MOST_CONCATENATED * width:
            return False
    return True


def _widths_between_modules(modules: _Modules, inputs: Collection[str]) -> set[int]:
    """Return the widths that layers and norms read from outside of their block, such as 64 in a block of 64, 256, 64.

    Where an earlier layer of the same block returns the width, as 256, it is an inner width. A layer outside of the
    block that returns 256 features may still be an output head.

    >>> mlp = [Layer("h.0.up", 64, 256, block="h.0"), Layer("h.0.down", 256, 64, block="h.0")]
    >>> _widths_between_modules(_Modules(mlp, norms=[]), inputs=[])
    {64}

    ``inputs`` are the paths of layers that read raw input. Their widths are left out, since a model of images may read
    and return the same number of raw features.
    """
    widths: set[int] = set()
    # The widths that the layers so far have returned, by block: {"h.0": {256}}.
    returned_in: dict[str | None, set[int]] = defaultdict(set)
    for layer in (*modules.layers, *modules.norms):
        is_inner_width = layer.block is not None and layer.reads in returned_in[layer.block]
        if layer.path not in inputs and not is_inner_width:
            widths.add(layer.reads)
        returned_in[layer.block].add(layer.returns)
    return widths


def _heads(modules: _Modules, inputs: Collection[str]) -> tuple[dict[str, Layer], set[str]]:
    """Return the output heads of a model with blocks, by path, and the paths of other layers that may be heads.

    A head is outside all blocks (the repeated modules), and no layer reads the width that it returns. Here, no layer
    reads 100 features. Nor does one read the 16 of "pool", which could also be two vectors of 8 features, each read
    by itself:

    >>> layers = [
    ...     Layer("pool.fc", 8, 16),
    ...     Layer("h.0.fc", 8, 8, block="h.0"),
    ...     Layer("lm_head", 8, 100),
    ... ]
    >>> heads, possible_heads = _heads(_Modules(layers, norms=[]), inputs=[])
    >>> list(heads), possible_heads
    (['lm_head'], {'pool.fc'})

    These are no heads: an embedding, an input, and a layer between others, which returns the width that it reads.
    ``inputs`` are the paths of the layers that read raw input.
    """
    layers = modules.layers
    last_in_blocks = max(index for index, layer in enumerate(layers) if layer.block is not None)
    widths_between = _widths_between_modules(modules, inputs)
    heads: dict[str, Layer] = {}
    possible_heads: set[str] = set()
    # 1. Layers outside of the blocks.
    for index, layer in enumerate(layers):
        is_embedding = layer.reads == 0
        if layer.block is not None or layer.path in inputs or is_embedding:
            continue
        is_between_layers = layer.returns == layer.reads
        if is_between_layers or layer.returns in widths_between:
            continue
        # It is no certain head if other layers may read its outputs in parts. Before the blocks, a small multiple of
        # the width that it reads may be several vectors: 16 features in the example.
        may_return_parts = is_modulation(layer.path)
        if index < last_in_blocks and _returns_parts(layer):
            may_return_parts = True
        if may_return_parts or _is_read_in_part(layer, layers[index + 1 :]):
            possible_heads.add(layer.path)
        else:
            heads[layer.path] = layer
    # 2. The last layer, if it is in a block. The block may be a list of heads, if no layer or norm reads its outputs.
    last = layers[-1]
    is_embedding = last.reads == 0
    is_read = last.returns in modules.read_widths or _returns_parts(last)
    if last.block is not None and not is_embedding and not is_read:
        possible_heads.add(last.path)
    return heads, possible_heads


def _module_around(path: str) -> str:
    """Return the path of the module that contains a layer, such as "blocks.0" for "blocks.0.fc"; "" is the model."""
    return path.rpartition(".")[0]


def _returns_parts(layer: Layer) -> bool:
    """Return True for a layer that returns several vectors of its own width, as a fused projection, or a modulation.

    >>> _returns_parts(Layer("attn.qkv", 64, 192)), _returns_parts(Layer("head", 64, 1000))
    (True, False)
    """
    # A layer may return two parts, up to the largest number that a layer is known to return.
    is_multiple = (
        layer.returns % layer.reads == 0 and 2 <= layer.returns // layer.reads <= MOST_PARTS
    )
    return is_multiple or is_modulation(layer.path)


def _is_read_in_part(layer: Layer, later_layers: Iterable[Layer]) -> bool:
    """Return True if a later layer in the same module reads a half of the features of a layer, or a concatenation.

    A layer that returns 64 features is read in part by one that reads 32, as in a gated MLP, or 128.

    >>> _is_read_in_part(Layer("mlp.fc1", 8, 64), [Layer("mlp.fc2", 32, 8)])
    True
    """
    widths = _widths_read_beside(layer, later_layers)
    return not widths.isdisjoint({layer.returns / 2, layer.returns * 2})


def _widths_read_beside(layer: Layer, later_layers: Iterable[Layer]) -> set[int]:
    """Return the widths that later layers of the same module read; the model itself is not such a module.

    >>> _widths_read_beside(Layer("mlp.fc1", 8, 64), [Layer("mlp.fc2", 32, 8), Layer("head", 8, 5)])
    {32}
    """
    holder = _module_around(layer.path)
    # All later layers are in the model, also those that have nothing to do with this one.
    if not holder:
        return set()
    return {later.reads for later in later_layers if later.path.startswith(f"{holder}.")}


def _read_in_parts(modules: _Modules) -> dict[str, int]:
    """Return the number of vectors that a layer returns, 2 or 3, by the path of each layer that returns several.

    In an MLP with a gate, ``fc1`` returns a gate and a value of 64 features each, and ``fc2`` reads their product:

    >>> mlp = [Layer("mlp.fc1", 8, 128), Layer("mlp.fc2", 64, 8)]
    >>> _read_in_parts(_Modules(mlp, norms=[]))
    {'mlp.fc1': 2}

    Such a layer returns more features than it reads, and a layer that may run after it reads a half, or else a third.
    No layer or norm in the module around both reads all of them. Layers outside do not count, since the features that
    they read may be others of the same width: in a pyramid, each stage is twice as wide as the one before it.
    """
    layers = modules.layers
    widths_in = _widths_by_module(modules)  # {"mlp": {8, 64}, "": {8, 64}}
    first_layer_in: dict[str, Layer] = {}  # by the path of the module
    part_counts: dict[str, int] = {}
    for index, (layer, next_layer) in enumerate(pairwise(layers)):
        holder = _module_around(layer.path)  # "mlp"
        first_layer = first_layer_in.setdefault(holder, layer)
        # 1. Leave out a layer that returns no more than it reads, or whose outputs are read as one vector.
        returns_more = 0 < layer.reads < layer.returns
        if not returns_more or _is_read_whole(layer, widths_in[holder]):
            continue
        # 2. The widths that may be read from its outputs: {64} for "mlp.fc1". They are those of later layers in its
        # module, and of the next layer, if that is outside of the module and no layer around both reads the whole.
        widths_after = _widths_read_beside(layer, layers[index + 1 :])
        widths_in_both = widths_in[_module_around_both(layer.path, next_layer.path)]
        if next_layer.block == layer.block and not _is_read_whole(layer, widths_in_both):
            widths_after.add(next_layer.reads)
        # 3. Without the widths that this layer and the first one in its module read: another layer of such a width may
        # read the same input, as a key does with a query. A depthwise convolution in the next place is an exception,
        # because it reads the outputs of the layer before it.
        if not next_layer.is_grouped:
            widths_after -= {layer.reads, first_layer.reads}
        # 4. A half is tried before a third.
        for count in COUNTS_OF_PARTS:
            if layer.returns / count in widths_after:
                part_counts[layer.path] = count
                break
    return part_counts


def _is_read_whole(layer: Layer, widths: Collection[int]) -> bool:
    """Return True if one of the widths fits all outputs of a layer, alone or concatenated with as many other features.

    >>> layer = Layer("mlp.fc1", 8, 128)
    >>> (
    ...     _is_read_whole(layer, {8, 64}),
    ...     _is_read_whole(layer, {8, 128}),
    ...     _is_read_whole(layer, {8, 256}),
    ... )
    (False, True, True)
    """
    return layer.returns in widths or 2 * layer.returns in widths


def _module_around_both(path: str, other_path: str) -> str:
    """Return the path of the innermost module that contains two layers.

    >>> _module_around_both("h.0.attn.qkv.linear", "h.0.attn.proj.linear")
    'h.0.attn'
    """
    innermost = ""
    for module in _with_ancestors(_module_around(path)):
        if other_path.startswith(f"{module}."):
            innermost = module
    return innermost


def _widths_by_module(modules: _Modules) -> dict[str, set[int]]:
    """Return the widths that the layers and norms in each module read, by the path of the module; "" is the model.

    >>> mlp = [Layer("h.0.mlp.up", 8, 16), Layer("h.0.mlp.down", 16, 8), Layer("head", 8, 5)]
    >>> widths = _widths_by_module(_Modules(mlp, norms=[]))
    >>> widths["h.0.mlp"], widths[""]
    ({8, 16}, {8, 16})
    """
    widths: dict[str, set[int]] = defaultdict(set)
    for layer in (*modules.layers, *modules.norms):
        # A grouped layer works on each vector by itself, as between the two layers of a gated MLP.
        if layer.is_grouped:
            continue
        for path in _with_ancestors(_module_around(layer.path)):
            widths[path].add(layer.reads)
    return widths


def _read_in_their_block(layers: Sequence[Layer]) -> frozenset[str]:
    """Return the paths of layers whose outputs another layer of the same block may read: they are no output heads.

    A block is one of the repeated modules of a model. A layer may read what another returns if the widths are equal:
    with a ``q_head`` of 8 -> 64 features and an ``out`` of 64 -> 8, each of the two may read from the other.

    >>> sorted(
    ...     _read_in_their_block(
    ...         [Layer("h.0.q_head", 8, 64, "h.0"), Layer("h.0.out", 64, 8, "h.0")]
    ...     )
    ... )
    ['h.0.out', 'h.0.q_head']
    """
    # {("h.0", 64): 1, ...}
    count_of_readers = Counter((layer.block, layer.reads) for layer in layers)
    read: set[str] = set()
    for layer in layers:
        other_readers = count_of_readers[layer.block, layer.returns]
        if layer.reads == layer.returns:
            other_readers -= 1  # without the layer itself
        if layer.block is not None and other_readers > 0:
            read.add(layer.path)
    return frozenset(read)
