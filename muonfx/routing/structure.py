"""Read the structure of a model: its layers in the order of definition, its blocks, its first and its last layers.

A module has no record of the order in which its layers run. The order of definition, the widths that layers read and
return, and the lists of blocks are known without running the model:

- A *layer* is a linear layer or a convolution. It reads vectors of one width, and returns vectors of another width.
- A *block* is a module with children in an ``nn.ModuleList`` or in an ``nn.ModuleDict`` with numbers as keys, or one of
  several such modules of the same class in an ``nn.Sequential``. Blocks are the body of a model. An ``nn.Sequential``
  whose last layer returns what no other layer reads is no block, but one of several heads.
- An *input* is a layer outside all blocks, if no earlier layer returns what it reads, whole or concatenated. After all
  blocks, it is one only if some layer or norm reads features as wide as it returns.
- A *head* is a layer outside all blocks whose outputs no other layer reads, whole or in parts. If it returns a multiple
  of the width that it reads, it may also be a fused projection. It is a head if it is after all blocks, and the module
  around it contains another head.
- A layer is *read in parts* if a later layer reads a half or a third of its outputs, and no layer or norm in the module
  around both reads the whole: the layer returns several vectors, such as the two of a gated linear unit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

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
_MOST_CONCATENATED = 32  # the frequencies that a speech encoder flattens, or the 4 x 4 pixels that a connector merges


class Layer(NamedTuple):
    """A linear layer, a convolution or an embedding, by its path in the model, such as "blocks.0.fc"."""

    path: str
    reads: int | None
    """The width of the vectors that it reads; None for an embedding, which reads indices."""
    returns: int
    """The width of the vectors that it returns."""
    block: str | None = None
    """The path of the outermost block that contains it, such as "blocks.0"; None outside all blocks."""
    is_grouped: bool = False
    """True for a convolution with groups, such as a depthwise convolution."""


class Norm(NamedTuple):
    """A norm, or another vector that belongs to no layer."""

    path: str
    width: int
    block: str | None = None
    """The path of the outermost block that contains it; None outside all blocks."""


class Structure(NamedTuple):
    """The inputs, heads and tables of a model; the docstring of this file explains the terms."""

    held_by_no_layer: frozenset[str] = frozenset()
    """The names of parameters that are not the weight of a layer, as ``self.pos = nn.Parameter(...)``."""
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
    read_one_channel: frozenset[str] = frozenset()
    """The paths of layers that read one channel. Their kernels have the shape of a depthwise convolution's."""


def structure_of(model: object) -> Structure:
    """Return which layers of a model are its first and its last ones, and other facts that the widths of layers show.

    The widths are read from the modules that the model defines. The model is not run. Named tensors without a model
    have an empty structure.

    >>> block = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    >>> parts = {"embed": nn.Linear(3, 8), "blocks": nn.ModuleList([block]), "head": nn.Linear(8, 5)}
    >>> structure = structure_of(nn.ModuleDict(parts))
    >>> list(structure.inputs), list(structure.heads)
    (['embed'], ['head'])
    """
    if not isinstance(model, nn.Module):
        return Structure()
    defined = _modules_of(model)
    layers = defined.layers
    has_blocks = any(layer.block is not None for layer in layers)
    if has_blocks:  # the repeated modules of the body: inputs and heads are outside of them
        inputs = _inputs(defined)
        heads, possible_heads = _heads(defined, inputs)
    else:  # nothing shows which layers are the first and the last
        inputs = {}
        heads = {}
        possible_heads = _possible_heads_without_blocks(layers, defined.norms)
    read_one_channel = {layer.path for layer in layers if layer.reads == 1 and not layer.is_grouped}
    return Structure(
        held_by_no_layer=frozenset(_held_by_no_layer(model)),
        inputs=inputs,
        heads=heads,
        read_in_their_block=_read_in_their_block(layers),
        possible_heads=frozenset(possible_heads),
        read_in_parts=_read_in_parts(defined),
        read_one_channel=frozenset(read_one_channel),
    )


class _Modules(NamedTuple):
    """The modules of a model that show its structure."""

    layers: list[Layer]
    """The layers in the order of definition."""
    norms: list[Norm]
    """The norms in the order of definition."""
    read_widths: set[int]
    """The widths that some layer or norm reads."""


def _modules_of(model: nn.Module) -> _Modules:
    """Return the layers and norms of a model, each with the block that contains it."""
    layers = list(_layers_of(model))
    norms = list(_norms_of(model))
    read_widths = {norm.width for norm in norms}
    for layer in layers:
        if layer.reads is not None:  # an embedding reads indices
            read_widths.add(layer.reads)
    # The widths show which modules are blocks. Only then, the block around each layer is known.
    blocks = set(_blocks_of(model, read_widths))
    return _Modules(_with_blocks(layers, blocks), _with_blocks(norms, blocks), read_widths)


_Part = TypeVar("_Part", Layer, Norm)


def _with_blocks(parts: Iterable[_Part], blocks: set[str]) -> list[_Part]:
    """Return layers or norms with the path of the block that contains each; ``blocks`` are the paths of all blocks."""
    return [part._replace(block=_block_around(part.path, blocks)) for part in parts]


def _may_be_head_in_block(last_layer: Layer, read_widths: set[int]) -> bool:
    """Return True if the last layer of a model is in a block, and returns features that no layer or norm reads.

    Such a layer may be an output head in an ``nn.ModuleList``. ``read_widths`` are the widths that some layer or norm
    of the model reads.

    >>> last_layer = Layer("parts.1.fc", reads=64, returns=10, block="parts.1")
    >>> _may_be_head_in_block(last_layer, {8, 64}), _may_be_head_in_block(last_layer, {10, 64})
    (True, False)
    """
    is_embedding = last_layer.reads is None
    if last_layer.block is None or is_embedding:
        return False
    if _returns_parts(last_layer):  # a small multiple of its own width: maybe a fused projection, read in parts
        return False
    return last_layer.returns not in read_widths


def _possible_heads_without_blocks(layers: Sequence[Layer], norms: Iterable[Norm]) -> set[str]:
    """Return the paths of layers that may be output heads, in a model without repeated modules (blocks).

    They are the last layer, and each layer whose outputs no other layer or norm reads, judged by equal widths. A model
    that ends in an embedding, or that is a single layer, has none.

    >>> layers = [Layer("fc1", 8, 16), Layer("fc2", 16, 8), Layer("out", 8, 5)]
    >>> _possible_heads_without_blocks(layers, norms=[])
    {'out'}
    """
    if not layers:
        return set()
    last_layer = layers[-1]
    is_embedding_last = last_layer.reads is None
    is_whole_model = last_layer.path == ""
    if is_embedding_last or is_whole_model:
        return set()
    widths_of_norms = {norm.width for norm in norms}
    possible_heads = {last_layer.path}
    for layer in layers:
        is_read_by_norm = layer.returns in widths_of_norms
        if layer.reads is not None and not is_read_by_norm and not _is_read(layer, layers):
            possible_heads.add(layer.path)
    return possible_heads


def _is_read(layer: Layer, layers: Sequence[Layer]) -> bool:
    """Return True if the widths allow that another of the ``layers`` reads the outputs of a layer: then it is no head.

    For a layer that returns 48 features, a reader is a layer that reads

    - 48 features, the whole; or 24 or 16, a half or a third, as in a gated MLP;
    - 96 features, which are several such vectors, concatenated or flattened (48 channels at 2 positions); such a reader
      is defined after the layer.

    >>> layers = [Layer("fc1", 8, 48), Layer("fc2", 24, 5)]
    >>> _is_read(layers[0], layers), _is_read(layers[1], layers)
    (True, False)
    """
    returned_widths = {other.returns for other in layers}
    is_later = False
    for reader in layers:
        if reader is layer:
            is_later = True  # for the layers that follow
            continue
        if reader.reads is None:
            continue
        reads_whole_or_part = layer.returns in (reader.reads, 2 * reader.reads, 3 * reader.reads)
        if reads_whole_or_part:
            return True
        # It combines no vectors if a layer returns just the width that it reads.
        if is_later and reader.reads not in returned_widths and reader.reads % layer.returns == 0:
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
        if isinstance(module, _HOLDERS_OF_MATRICES):  # such as nn.LSTM, whose matrices have other names than "weight"
            continue
        if module is model and isinstance(model, nn.ParameterList | nn.ParameterDict):  # tensors without layers
            continue
        is_layer = _is_layer(module)
        for leaf, _ in module.named_parameters(recurse=False):  # a leaf: the last component of a name
            is_weight_of_layer = is_layer and leaf in LEAVES_OF_LAYERS  # such as "weight"
            if not is_weight_of_layer:
                yield joined(path, leaf)


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


def _layers_of(model: nn.Module) -> Iterator[Layer]:
    """Yield the layers and embeddings of a model in the order of definition, with the widths that they read and return.

    >>> model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 4))
    >>> [(layer.path, layer.reads, layer.returns) for layer in _layers_of(model)]
    [('0', None, 8), ('1', 8, 4)]
    """
    for path, module in model.named_modules():
        if widths := _widths_of(module):
            reads, returns = widths
            yield Layer(path, reads, returns, is_grouped=getattr(module, "groups", 1) != 1)
        elif is_embedding(type(module)):  # it reads indices, so that it has no width that it reads
            width = getattr(module, "embedding_dim", None)
            if isinstance(width, int):
                yield Layer(path, None, width)


def is_embedding(module: type) -> bool:
    """Return True for the class of an embedding, judged by its type or its name."""
    return issubclass(module, nn.Embedding | nn.EmbeddingBag) or class_name_fits(module, _EMBEDDING_CLASS)


def _block_around(path: str, blocks: set[str]) -> str | None:
    """Return the path of the outermost block around a module, since blocks may be nested; None outside all blocks.

    >>> _block_around("stages.0.blocks.1.fc", {"stages.0", "stages.0.blocks.1"})
    'stages.0'
    """
    for ancestor in _with_ancestors(path):
        if ancestor in blocks:
            return ancestor
    return None


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


def _blocks_of(model: nn.Module, read_widths: set[int]) -> Iterator[str]:
    """Yield the paths of blocks, the repeated modules that are the body of a model.

    A block is a module of several layers in an ``nn.ModuleList``, in an ``nn.ModuleDict`` with numbers as keys (as in
    torchtitan), or one of several of the same class in an ``nn.Sequential``. Some models have a list of output heads,
    too. These are no blocks: each is an ``nn.Sequential`` whose last layer returns a width that is not in
    ``read_widths``, the widths that layers and norms of the model read.

    >>> body = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))])
    >>> heads = nn.ModuleList([nn.Sequential(nn.Linear(8, 5)), nn.Sequential(nn.Linear(8, 7))])
    >>> list(_blocks_of(nn.ModuleDict({"body": body, "heads": heads}), read_widths={8}))
    ['body.0', 'body.1']
    """
    for path, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) or _is_numbered_dict(module)
        if not is_list and not isinstance(module, nn.Sequential):
            continue
        children = {name: child for name, child in module.named_children() if any(child.children())}  # no single layers
        count_of_class = Counter(map(type, children.values()))
        for name, child in children.items():
            # A list is written for repeated modules. An nn.Sequential may also be a chain of different parts.
            is_repeated = is_list or count_of_class[type(child)] > 1
            if is_repeated and not _is_sequential_head(child, read_widths):
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


def _is_sequential_head(module: nn.Module, read_widths: set[int]) -> bool:
    """Return True if no layer reads the features that the last layer of an ``nn.Sequential`` returns: it is a head.

    For example, ``nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))``, if no layer of the model reads 5
    features. ``read_widths`` are the widths that some layer or norm of the model reads.
    """
    if type(module) is not nn.Sequential:  # the last layer of another module may run at any time
        return False
    # The layers of a sequence run in their order, so that the last one returns what the sequence returns.
    returned_width: int | None = None
    for child in module.modules():
        if layer_widths := _widths_of(child):
            _, returned_width = layer_widths
    return returned_width is not None and returned_width not in read_widths


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
    returns. A model may define it after its blocks, as the layer that reads the state of a robot next to images. There,
    a layer that returns a width that no layer or norm reads is a head.

    >>> layers = [Layer("embed", 3, 8), Layer("h.0.fc", 8, 8, block="h.0"), Layer("state", 7, 8), Layer("head", 8, 5)]
    >>> list(_inputs(_Modules(layers, norms=[], read_widths={3, 7, 8})))
    ['embed', 'state']
    """
    last_in_blocks = _last_in_blocks(modules.layers)
    part_counts = _read_in_parts(modules)
    inputs: dict[str, Layer] = {}
    earlier_widths: set[int] = set()  # that the layers before the current one return
    for index, layer in enumerate(modules.layers):
        may_be_head = index > last_in_blocks and layer.returns not in modules.read_widths
        if layer.block is None and not may_be_head and _reads_raw_input(layer, earlier_widths):
            inputs[layer.path] = layer
        earlier_widths.add(layer.returns)
        if layer.path in part_counts:  # a gated linear unit returns half as many features as its layer
            earlier_widths.add(layer.returns // part_counts[layer.path])
    return inputs


def _last_in_blocks(layers: Sequence[Layer]) -> int:
    """Return the index of the last layer in a block."""
    return max(index for index, layer in enumerate(layers) if layer.block is not None)


def _reads_raw_input(layer: Layer, earlier_widths: Iterable[int]) -> bool:
    """Return True if a layer reads features that no earlier layer returns, so that it reads the input of the model.

    ``earlier_widths`` are the numbers of features that the earlier layers return. If one of them is 64, a layer of 64,
    96 (a vector and half of another) or 128 features may read its outputs, one or several concatenated. Nor does a
    layer read raw input if it returns as many features as it reads, since such a layer is between others.

    >>> _reads_raw_input(Layer("patch", 768, 64), [64]), _reads_raw_input(Layer("patch", 100, 64), [64])
    (False, True)
    """
    if layer.reads is None or layer.reads == layer.returns:
        return False
    for width in earlier_widths:
        # 768 = 12 x 64 may be 12 concatenated vectors, and 96 = 1.5 x 64 one and a half. 100 features cannot be.
        reads_whole_halves = (2 * layer.reads) % width == 0
        if reads_whole_halves and width <= layer.reads <= _MOST_CONCATENATED * width:
            return False
    return True


def _widths_between_modules(modules: _Modules, inputs: Collection[str]) -> set[int]:
    """Return the widths of the vectors that pass between the modules of a model, as layers and norms read them.

    They are no inner widths of blocks, which a layer returns and a later layer reads in the same block. In an MLP of
    64 -> 256 -> 64, 256 is an inner width: a layer outside that returns 256 features may still be an output head.

    >>> mlp = [Layer("h.0.up", 64, 256, block="h.0"), Layer("h.0.down", 256, 64, block="h.0")]
    >>> _widths_between_modules(_Modules(mlp, norms=[], read_widths={64, 256}), inputs=[])
    {64}

    ``inputs`` are the paths of layers that read raw input. Their widths are left out, since a model of images may read
    and return the same number of raw features.
    """
    widths: set[int] = set()
    returned_in_block: set[tuple[str, int]] = set()  # pairs such as ("h.0", 256), up to the current layer
    for layer in modules.layers:
        is_inner_width = (layer.block, layer.reads) in returned_in_block
        if layer.reads is not None and layer.path not in inputs and not is_inner_width:
            widths.add(layer.reads)
        if layer.block is not None:
            returned_in_block.add((layer.block, layer.returns))  # in the end: a layer does not read its own outputs
    # The pairs of all layers, since a norm may be defined before the layers whose outputs it reads.
    for norm in modules.norms:
        if (norm.block, norm.width) not in returned_in_block:
            widths.add(norm.width)
    return widths


def _returns_slices(reads: int, returns: int, block_counts: Iterable[int], widths_between: set[int]) -> bool:
    """Return True if a layer returns one slice of features for each block: 48 -> 2 x 64, for 2 blocks that read 64.

    Such a layer, for example the embedding of a condition, is no head. A layer 32 -> 2 x 64 = 4 x 32 returns a multiple
    of its own width, as some heads do: its width is no evidence, so that the result is False.

    >>> _returns_slices(48, 128, block_counts=[2], widths_between={64})
    True
    >>> _returns_slices(32, 128, block_counts=[2], widths_between={64})
    False

    Args:
        reads: the width that the layer reads.
        returns: the width that it returns.
        block_counts: the number of blocks in each list of blocks.
        widths_between: the widths of the vectors that pass between the modules of the model, without its raw inputs.
    """
    for count in block_counts:
        width_of_slice = returns / count
        if width_of_slice not in widths_between:  # also if the features do not divide by the number of blocks
            continue
        may_be_head = width_of_slice % reads == 0
        if not may_be_head:
            return True
    return False


def _candidates_for_heads(modules: _Modules, inputs: Collection[str]) -> Iterator[tuple[int, Layer]]:
    """Yield the index and the layer for each layer of a model that may be an output head, judged by its width.

    A head is outside all blocks (repeated modules), and no layer or norm reads the width that it returns, except within
    a block. These are no heads:

    - the first layers of the model; ``inputs`` has their paths;
    - an embedding, which reads indices;
    - a layer between others, which returns the width that it reads;
    - a layer that returns a slice of features for each block, such as the embedding of a condition.

    >>> layers = [Layer("embed", 3, 8), Layer("h.0.fc", 8, 8, block="h.0"), Layer("lm_head", 8, 100)]
    >>> [layer.path for _, layer in _candidates_for_heads(_Modules(layers, norms=[], read_widths={3, 8}), ["embed"])]
    ['lm_head']
    """
    widths_between_modules = _widths_between_modules(modules, inputs)
    block_counts = _numbers_of_blocks(modules.layers)
    for index, layer in enumerate(modules.layers):
        if layer.block is not None or layer.path in inputs or layer.reads is None:
            continue
        is_between_others = layer.returns == layer.reads
        if is_between_others or layer.returns in widths_between_modules:
            continue
        if not _returns_slices(layer.reads, layer.returns, block_counts, widths_between_modules):
            yield index, layer


def _heads(modules: _Modules, inputs: Collection[str]) -> tuple[dict[str, Layer], set[str]]:
    """Return the output heads of a model with blocks, by path, and the paths of other layers that may be heads.

    A head is outside all blocks (the repeated modules), and no layer reads the width that it returns. Here, no layer
    reads 100 features. Nor does one read the 16 of "pool", which could also be two vectors of 8 features, each read
    by itself:

    >>> layers = [Layer("h.0.fc", 8, 8, block="h.0"), Layer("lm_head", 8, 100), Layer("pool.fc", 8, 16)]
    >>> heads, possible_heads = _heads(_Modules(layers, norms=[], read_widths={8}), inputs=[])
    >>> list(heads), possible_heads
    (['lm_head'], {'pool.fc'})

    ``inputs`` are the paths of the layers that read raw input.
    """
    layers = modules.layers
    last_in_blocks = _last_in_blocks(layers)
    heads: dict[str, Layer] = {}
    possible_heads: set[str] = set()
    multiples_after_blocks: list[Layer] = []  # they return a multiple of the width that they read, as "pool.fc"
    for index, layer in _candidates_for_heads(modules, inputs):
        possible_heads.add(layer.path)
        # A layer that returns several vectors, of which other layers read each, is no head.
        later_layers = layers[index + 1 :]
        if is_modulation(layer.path) or _is_read_in_part(layer, later_layers):
            continue
        if not _returns_parts(layer):
            heads[layer.path] = layer
        elif index > last_in_blocks:
            multiples_after_blocks.append(layer)
    # In one module with a head, such a layer is a head, too: the 4 x 64 logits of a policy, and the value of a critic.
    modules_with_heads = {_module_around(path) for path in heads}
    for layer in multiples_after_blocks:
        if _module_around(layer.path) in modules_with_heads:
            heads[layer.path] = layer
    # The last layer may be a head in an nn.ModuleList.
    if _may_be_head_in_block(layers[-1], modules.read_widths):
        possible_heads.add(layers[-1].path)
    return heads, possible_heads - heads.keys()


def _module_around(path: str) -> str:
    """Return the path of the module that contains a layer, such as "blocks.0" for "blocks.0.fc"; "" is the model."""
    return path.rpartition(".")[0]


def _numbers_of_blocks(layers: Sequence[Layer]) -> set[int]:
    """Return the number of blocks in each list of at least two blocks.

    >>> _numbers_of_blocks([Layer("h.0.fc", 8, 8, "h.0"), Layer("h.1.fc", 8, 8, "h.1")])
    {2}
    """
    list_of_block: dict[str, str] = {}  # {"h.0": "h", "h.1": "h"}
    for layer in layers:
        if layer.block is not None:
            list_of_block[layer.block] = _module_around(layer.block)
    lengths = Counter(list_of_block.values()).values()
    return {length for length in lengths if length > 1}


def _returns_parts(layer: Layer) -> bool:
    """Return True for a layer that returns several vectors of its own width, as a fused projection, or a modulation.

    >>> _returns_parts(Layer("attn.qkv", 64, 192)), _returns_parts(Layer("head", 64, 1000))
    (True, False)
    """
    if layer.reads is None:
        return False
    # From twice its own width up to the largest number of parts that a layer is known to return.
    multiples = {count * layer.reads for count in range(2, MOST_PARTS + 1)}
    return layer.returns in multiples or is_modulation(layer.path)


def _is_read_in_part(layer: Layer, later_layers: Sequence[Layer]) -> bool:
    """Return True if a later layer in the same module reads a half of the features of a layer, or a concatenation.

    A layer that returns 64 features is read in part by one that reads 32, as in a gated MLP, or 128.

    >>> _is_read_in_part(Layer("mlp.fc1", 8, 64), [Layer("mlp.fc2", 32, 8)])
    True
    """
    widths = _widths_read_beside(layer, later_layers)
    half = layer.returns / 2
    width_with_another = layer.returns * 2  # concatenated with the outputs of another layer
    return half in widths or width_with_another in widths


def _read_in_parts(modules: _Modules) -> dict[str, int]:
    """Return the number of vectors that a layer returns, 2 or 3, by the path of each layer that returns several.

    In an MLP with a gate, ``fc1`` returns a gate and a value of 64 features each, and ``fc2`` reads their product:

    >>> mlp = [Layer("mlp.fc1", 8, 128), Layer("mlp.fc2", 64, 8)]
    >>> _read_in_parts(_Modules(mlp, norms=[], read_widths={8, 64}))
    {'mlp.fc1': 2}

    Such a layer returns more features than it reads, and a layer that may run after it reads a half, or else a third.
    No layer or norm in the module around both reads all of them. Layers outside do not count, since the features that
    they read may be others of the same width: in a pyramid, each stage is twice as wide as the one before it.
    """
    layers = modules.layers
    widths_in = _widths_by_module(modules)
    first_layer_in: dict[str, Layer] = {}  # by the path of the module
    part_counts: dict[str, int] = {}
    for index, (layer, next_layer) in enumerate(pairwise(layers)):
        holder = _module_around(layer.path)
        first_layer = first_layer_in.setdefault(holder, layer)
        returns_more = layer.reads is not None and layer.returns > layer.reads
        if not returns_more or _is_read_whole(layer, widths_in[holder]):
            continue
        # The widths that layers read that may run after this one.
        widths_after: set[int | None] = set(_widths_read_beside(layer, layers[index + 1 :]))
        widths_in_both = widths_in[_module_around_both(layer.path, next_layer.path)]
        if next_layer.block == layer.block and not _is_read_whole(layer, widths_in_both):
            widths_after.add(next_layer.reads)
        # A layer that reads the same width as this one, or the first one, may run on the same input, as a key does with
        # a query. Only a depthwise convolution in the next place surely reads the outputs of the layer before it.
        if not next_layer.is_grouped:
            widths_after -= {layer.reads, first_layer.reads}
        for count in COUNTS_OF_PARTS:  # halves are tried before thirds
            if layer.returns / count in widths_after:
                part_counts[layer.path] = count
                break
    return part_counts


def _is_read_whole(layer: Layer, widths: Collection[int]) -> bool:
    """Return True if one of the widths fits all outputs of a layer, alone or concatenated with as many other features.

    >>> layer = Layer("mlp.fc1", 8, 128)
    >>> _is_read_whole(layer, {8, 64}), _is_read_whole(layer, {8, 128}), _is_read_whole(layer, {8, 256})
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
    >>> widths = _widths_by_module(_Modules(mlp, norms=[], read_widths={8, 16}))
    >>> widths["h.0.mlp"], widths[""]
    ({8, 16}, {8, 16})
    """
    widths: dict[str, set[int]] = defaultdict(set)
    for layer in modules.layers:
        for path in _with_ancestors(_module_around(layer.path)):
            # A convolution with groups, as between the two layers of a gated MLP, works on each vector by itself.
            if layer.reads is not None and not layer.is_grouped:
                widths[path].add(layer.reads)
    for norm in modules.norms:
        for path in _with_ancestors(_module_around(norm.path)):
            widths[path].add(norm.width)
    return widths


def _widths_read_beside(layer: Layer, later_layers: Sequence[Layer]) -> set[int]:
    """Return the widths that later layers of the same module read; the model itself is not such a module.

    >>> _widths_read_beside(Layer("mlp.fc1", 8, 64), [Layer("mlp.fc2", 32, 8), Layer("head", 8, 5)])
    {32}
    """
    holder = _module_around(layer.path)
    if not holder:  # all later layers are in the model, also those that have nothing to do with this one
        return set()
    widths: set[int] = set()
    for later in later_layers:
        if later.reads and later.path.startswith(f"{holder}."):
            widths.add(later.reads)
    return widths


def _norms_of(model: nn.Module) -> Iterator[Norm]:
    """Yield the norms of a model, and other modules with vectors that belong to no layer.

    A norm reads vectors of the width of its gain, its 1-D weight. A layer norm has two vectors, and is yielded twice:

    >>> [(norm.path, norm.width) for norm in _norms_of(nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64)))]
    [('1', 64), ('1', 64)]
    """
    for path, module in model.named_modules():
        if _widths_of(module) is not None:  # a layer, whose vector is a bias
            continue
        for param in module.parameters(recurse=False):
            if param.ndim == 1:
                yield Norm(path, param.shape[0])


def _read_in_their_block(layers: Sequence[Layer]) -> frozenset[str]:
    """Return the paths of layers whose outputs another layer of the same block may read: they are no output heads.

    A block is one of the repeated modules of a model. A layer may read what another returns if the widths are equal:
    with a ``q_head`` of 8 -> 64 features and an ``out`` of 64 -> 8, each of the two may read from the other.

    >>> sorted(_read_in_their_block([Layer("h.0.q_head", 8, 64, "h.0"), Layer("h.0.out", 64, 8, "h.0")]))
    ['h.0.out', 'h.0.q_head']
    """
    blocks_and_widths = [(layer.block, layer.reads) for layer in layers]
    count_of_readers = Counter(blocks_and_widths)  # how many layers of a block read a width: {("h.0", 64): 1, ...}
    read: set[str] = set()
    for layer in layers:
        if layer.block is None:
            continue
        other_readers = count_of_readers[layer.block, layer.returns]
        if layer.reads == layer.returns:
            other_readers -= 1  # without the layer itself
        if other_readers > 0:
            read.add(layer.path)
    return frozenset(read)
