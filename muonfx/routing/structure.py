"""Read the structure of a model: its layers in the order of definition, its blocks, its first and its last layers.

A module has no record of the order in which its layers run. The order of definition, the widths that layers read and
return, and the lists of blocks are known without running the model:

- A *layer* is a linear layer or a convolution. It reads vectors of one width, and returns vectors of another width.
- A *block* is a module with children in an ``nn.ModuleList``, or one of several such modules of the same class in an
  ``nn.Sequential``. Blocks are the body of a model. An ``nn.Sequential`` whose last layer returns what no other layer
  reads is no block, but one of several heads.
- An *input* is a layer before the blocks of its part of the model, if no earlier layer returns what it reads, whole or
  concatenated. The part is the innermost module around it that contains blocks.
- A *head* is a layer outside all blocks whose outputs no other layer reads, whole or in parts. If it returns a multiple
  of the width that it reads, it may also be a fused projection. It is a head if it is after all blocks, and the module
  around it contains another head.
- A layer is *read in parts* if a later layer reads a half or a third of its outputs, and no layer or norm reads the
  whole: the layer returns several vectors, such as the two of a gated linear unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from muonfx.routing.views import MOST_PARTS, PLAIN_LEAVES, class_name_fits, is_modulation

# The attributes for the width that a layer reads and the width that it returns: nn.Linear, convolutions, the Conv1D of
# transformers, and the parallel linear layers of Megatron.
_WIDTHS = (
    ("in_features", "out_features"),
    ("in_channels", "out_channels"),
    ("nx", "nf"),
    ("input_size", "output_size"),
)
_EMBEDDING_CLASS = r"Embedding(s|Bag|\d+bit)?$"
_LAYER_CLASS = r"Linear|Conv|Dense|Proj|Expert|MatMul"
_LEAVES_OF_LAYERS = PLAIN_LEAVES | {"weight_v"}
_COUNTS_OF_PARTS = (3, 2)  # such as query, key and value; the value and the gate of a gated linear unit
_MOST_CONCATENATED = 32  # the frequencies that a speech encoder flattens, or the 4 x 4 pixels that a connector merges


@dataclass(frozen=True)
class Layer:
    """A linear layer, a convolution or an embedding, by its path in the model, such as "blocks.0.fc"."""

    path: str
    reads: int | None
    """The width of the vectors that it reads; None for an embedding, which reads indices."""
    returns: int
    """The width of the vectors that it returns."""
    block: str | None
    """The path of the outermost block that contains it, such as "blocks.0"; None outside all blocks."""
    is_grouped: bool = False
    """True for a convolution with groups, such as a depthwise convolution."""


class Norm(NamedTuple):
    """A norm, or another vector that belongs to no layer."""

    width: int
    block: str | None
    """The path of the outermost block that contains it; None outside all blocks."""


@dataclass(frozen=True)
class Structure:
    """The inputs, heads and tables of a model; the docstring of this file explains the terms."""

    held_by_no_layer: frozenset[str] = frozenset()
    """The names of parameters that are not the weight of a layer, as ``self.pos = nn.Parameter(...)``."""
    inputs: dict[str, Layer] = field(default_factory=dict[str, Layer])
    """The inputs by path."""
    heads: dict[str, Layer] = field(default_factory=dict[str, Layer])
    """The heads by path."""
    read_in_their_block: frozenset[str] = frozenset()
    """The paths of layers in blocks whose outputs another layer of the same block reads: hidden under any name."""
    possible_heads: frozenset[str] = frozenset()
    """The paths of layers that may be heads: the widths alone do not show whether they are heads or hidden."""
    read_in_parts: dict[str, int] = field(default_factory=dict[str, int])
    """The number of vectors that a layer returns, 2 or 3, for the path of each layer that is read in parts."""


UNKNOWN_STRUCTURE = Structure()
"""The structure of named tensors without a model."""


def structure_of(model: nn.Module) -> Structure:
    """Return the structure of a model, from the modules that it defines; the model is not run."""
    held_by_no_layer = frozenset(_held_by_no_layer(model))
    read_widths = _read_widths(model)
    blocks = set(_blocks_of(model, read_widths))
    layers = list(_layers_of(model, blocks))
    read_in_parts = _read_in_parts(layers, read_widths)
    if all(layer.block is None for layer in layers):
        possible_heads = _possible_heads_without_blocks(layers, _widths_of_norms(model))
        return Structure(held_by_no_layer, possible_heads=possible_heads, read_in_parts=read_in_parts)
    inputs = _inputs(layers)
    unread = _unread_outside_blocks(layers, inputs, list(_norms_of(model, blocks)))
    unread = _without_slices(unread, layers, read_widths)
    heads = _heads(layers, unread)
    possible_heads = unread.keys() - heads.keys()
    if _may_return_from_block(layers[-1], read_widths):
        possible_heads |= {layers[-1].path}
    return Structure(
        held_by_no_layer, inputs, heads, _read_in_their_block(layers), frozenset(possible_heads), read_in_parts
    )


def _may_return_from_block(last_layer: Layer, read_widths: set[int]) -> bool:
    """Return True if the last layer of a model is in a block, and returns whole what no layer or norm reads."""
    if last_layer.block is None or last_layer.reads is None:
        return False
    return last_layer.returns not in read_widths and not _returns_parts(last_layer)


def _possible_heads_without_blocks(layers: Sequence[Layer], widths_of_norms: set[int]) -> frozenset[str]:
    """Return the paths of layers whose outputs no later layer reads, in a model without blocks.

    The widths do not show whether such a layer is a head. The last layer is always one of them, unless it is an
    embedding or the whole model.
    """
    if not layers or layers[-1].reads is None or layers[-1].path == "":
        return frozenset()
    possible_heads: set[str] = set()
    for index, layer in enumerate(layers):
        if layer.reads is None:
            continue
        is_last = index == len(layers) - 1
        if is_last or not _is_read_later(layer, layers, widths_of_norms):
            possible_heads.add(layer.path)
    return frozenset(possible_heads)


def _is_read_later(layer: Layer, layers: Sequence[Layer], widths_of_norms: set[int]) -> bool:
    """Return True if another layer or a norm may read what a layer returns: whole, in parts, flattened or concatenated.

    A convolution of 16 channels is flattened for a linear layer that reads 400 features.
    """
    if layer.returns in widths_of_norms:
        return True
    returned_widths = {reader.returns for reader in layers}
    for reader in layers:
        if reader is layer or reader.reads is None:
            continue
        if layer.returns in (reader.reads, 2 * reader.reads, 3 * reader.reads):
            return True
        is_of_raw_input = reader is layers[0]
        is_read_whole = reader.reads in returned_widths or is_of_raw_input
        if not is_read_whole and reader.reads % layer.returns == 0:  # flattened or concatenated
            return True
    return False


def _read_widths(model: nn.Module) -> set[int]:
    """Return the widths that some layer or some norm reads."""
    widths = _widths_of_norms(model)
    for module in model.modules():
        if layer_widths := _widths_of(module):
            widths.add(layer_widths[0])
    return widths


# Modules whose parameters are matrices under names of their own, or parts of one in the module around them.
_HOLDERS_OF_MATRICES = (
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    parametrize.ParametrizationList,
)


def _held_by_no_layer(model: nn.Module) -> Iterator[str]:
    """Yield the names of parameters that are not the weight of a layer, such as "pos_embed" and "fc.bias"."""
    for path, module in model.named_modules(remove_duplicate=False):
        is_list = isinstance(module, nn.ParameterList | nn.ParameterDict)
        is_list_of_params = is_list and path == ""  # the "model" is a list of tensors, without layers
        if isinstance(module, _HOLDERS_OF_MATRICES) or is_list_of_params:
            continue
        is_layer = _is_layer(module)
        for name, _ in module.named_parameters(recurse=False):
            if not is_layer or name not in _LEAVES_OF_LAYERS:
                yield f"{path}.{name}" if path else name


def _is_layer(module: nn.Module) -> bool:
    """Return True if a module is a linear layer or a convolution, judged by its widths, class name or bias."""
    if _widths_of(module) is not None or class_name_fits(type(module), _LAYER_CLASS):
        return True
    leaves = {name for name, _ in module.named_parameters(recurse=False)}
    return {"weight", "bias"} <= leaves


def _layers_of(model: nn.Module, blocks: set[str]) -> Iterator[Layer]:
    """Yield the layers and embeddings of a model in the order of definition, each with the block that it is in.

    ``blocks`` are the paths of blocks.
    """
    for path, module in model.named_modules():
        block = _block_around(path, blocks)
        if widths := _widths_of(module):
            reads, returns = widths
            yield Layer(path, reads, returns, block, is_grouped=getattr(module, "groups", 1) != 1)
        elif isinstance(module, nn.Embedding) or class_name_fits(type(module), _EMBEDDING_CLASS):
            width = getattr(module, "embedding_dim", None)
            if isinstance(width, int):
                yield Layer(path, None, width, block)


def _block_around(path: str, blocks: set[str]) -> str | None:
    """Return the path of the outermost block around a module, since blocks may be nested; None outside all blocks."""
    for ancestor in _with_ancestors(path):
        if ancestor in blocks:
            return ancestor
    return None


def _widths_of(module: nn.Module) -> tuple[int, int] | None:
    """Return the widths that a linear layer or a convolution reads and returns; None for another module."""
    leaves = {name for name, _ in module.named_parameters(recurse=False)}
    if leaves.isdisjoint(_LEAVES_OF_LAYERS) and not parametrize.is_parametrized(module):
        return None
    for reads_name, returns_name in _WIDTHS:
        reads = getattr(module, reads_name, None)
        returns = getattr(module, returns_name, None)
        if isinstance(reads, int) and isinstance(returns, int):
            return reads, returns
    return None


def _blocks_of(model: nn.Module, read_widths: set[int]) -> Iterator[str]:
    """Yield the paths of blocks, such as "blocks.0" and "blocks.1", the repeated parts that are the body of a model.

    A block is a child of an ``nn.ModuleList``, or one of several children of the same class in an ``nn.Sequential``.
    It has children itself: a single layer is no block. Nor is one of several heads, an ``nn.Sequential`` whose outputs
    no layer reads. ``read_widths`` are the widths that some layer or norm reads.
    """
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = {name: child for name, child in module.named_children() if any(child.children())}
        count_of_class = Counter(type(child) for child in children.values())
        for name, child in children.items():
            # An nn.ModuleList is written for repeated modules. An nn.Sequential may also be a chain of different parts.
            is_repeated = isinstance(module, nn.ModuleList) or count_of_class[type(child)] > 1
            if is_repeated and not _is_sequential_head(child, read_widths):
                yield f"{path}.{name}" if path else name


def _is_sequential_head(module: nn.Module, read_widths: set[int]) -> bool:
    """Return True if no layer reads what the last layer of an ``nn.Sequential`` returns."""
    if type(module) is not nn.Sequential:  # the last layer of another module may run at any time
        return False
    layer_widths = [widths for widths in map(_widths_of, module.modules()) if widths is not None]
    return bool(layer_widths) and layer_widths[-1][1] not in read_widths


def _with_ancestors(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a module, the outermost first: "", "a", "a.b" and "a.b.c" for "a.b.c"."""
    yield ""
    components = path.split(".") if path else []
    for count in range(1, len(components) + 1):
        yield ".".join(components[:count])


def _inputs(layers: Sequence[Layer]) -> dict[str, Layer]:
    """Return the layers of raw input by path; ``layers`` are in the order of definition.

    Such a layer is before the blocks of its part of the model, and reads what no earlier layer returns. Its part is
    the innermost module around it that contains blocks, such as "decoder" for ``decoder.embed``.
    """
    first_in_blocks = _first_in_blocks(layers)
    inputs: dict[str, Layer] = {}
    returned_widths: set[int] = set()
    for index, layer in enumerate(layers):
        part = ""  # the whole model
        for path in _with_ancestors(layer.path):
            if path in first_in_blocks:
                part = path
        is_before_blocks = layer.block is None and index < first_in_blocks[part]
        if is_before_blocks and _reads_raw_input(layer, returned_widths):
            inputs[layer.path] = layer
        returned_widths.add(layer.returns)
    return inputs


def _first_in_blocks(layers: Sequence[Layer]) -> dict[str, int]:
    """Return the index of the first layer in a block, for the path of each module that contains blocks.

    It is {"": 1, "encoder": 1, "decoder": 9} if the first block of the encoder begins with layer 1, and the first block
    of the decoder with layer 9.
    """
    first_in_blocks: dict[str, int] = {}
    for index, layer in enumerate(layers):
        if layer.block is None:
            continue
        for path in _with_ancestors(layer.block):
            if path != layer.block:
                first_in_blocks.setdefault(path, index)
    return first_in_blocks


def _reads_raw_input(layer: Layer, returned_widths: Iterable[int]) -> bool:
    """Return True if no earlier layer returns what a layer reads, whole or concatenated.

    A layer that returns the width that it reads is between others.
    """
    if layer.reads is None or layer.reads == layer.returns:
        return False
    for width in returned_widths:
        # Layers of cross-stage networks concatenate a whole and halves.
        is_concatenated = width <= layer.reads <= _MOST_CONCATENATED * width
        if is_concatenated and (2 * layer.reads) % width == 0:
            return False
    return True


def _unread_outside_blocks(
    layers: Sequence[Layer], inputs: Mapping[str, Layer], norms: Sequence[Norm]
) -> dict[str, Layer]:
    """Return the layers outside all blocks, by path, whose outputs no other layer reads as a whole.

    Args:
        layers: the layers of the model in the order of definition, some of them in blocks.
        inputs: those that read raw input, which are no heads.
        norms: the norms of the model.
    """
    read_widths = _widths_read_from_outside(layers, inputs, norms)
    unread: dict[str, Layer] = {}
    for layer in layers:
        if layer.reads is None or layer.block is not None or layer.path in inputs:
            continue
        if layer.returns != layer.reads and layer.returns not in read_widths:
            unread[layer.path] = layer
    return unread


def _widths_read_from_outside(layers: Sequence[Layer], inputs: Mapping[str, Layer], norms: Sequence[Norm]) -> set[int]:
    """Return the widths that some layer or norm reads, and that no earlier layer of its own block returns.

    The inner width of an MLP in a block is read there only. A head may have this width too.
    """
    widths: set[int] = set()
    returned_in_block: set[tuple[str | None, int]] = set()
    for layer in layers:
        is_from_outside = layer.block is None or (layer.block, layer.reads) not in returned_in_block
        # A model of images or actions may read and return one raw width: an input does not read what a head returns.
        if layer.reads is not None and layer.path not in inputs and is_from_outside:
            widths.add(layer.reads)
        returned_in_block.add((layer.block, layer.returns))
    for norm in norms:
        if norm.block is None or (norm.block, norm.width) not in returned_in_block:
            widths.add(norm.width)
    return widths


def _without_slices(unread: Mapping[str, Layer], layers: Sequence[Layer], read_widths: set[int]) -> dict[str, Layer]:
    """Return ``unread`` without layers that return a slice for each of several blocks.

    A layer whose slices would have a multiple of the width that it reads may as well be a head, and is not left out.
    ``read_widths`` are the widths that some layer or norm reads.
    """
    remaining = dict(unread)
    for path, layer in unread.items():
        for count in _numbers_of_blocks(layers):
            slice_width, remainder = divmod(layer.returns, count)
            is_slice = remainder == 0 and slice_width in read_widths
            if is_slice and layer.reads is not None and slice_width % layer.reads != 0:
                remaining.pop(path, None)
    return remaining


def _heads(layers: Sequence[Layer], unread: Mapping[str, Layer]) -> dict[str, Layer]:
    """Return the heads by path.

    Args:
        layers: the layers of the model in the order of definition, some of them in blocks.
        unread: those outside blocks whose outputs no other layer reads as a whole, by path.
    """
    last_in_block = max(index for index, layer in enumerate(layers) if layer.block is not None)
    heads: dict[str, Layer] = {}
    fused_or_heads: list[Layer] = []  # layers after the blocks that are either fused projections or heads
    for index, layer in enumerate(layers):
        is_divided = is_modulation(layer.path) or _is_read_in_parts(layer, layers[index + 1 :])
        if layer.path not in unread or is_divided:
            continue
        if not _returns_parts(layer):
            heads[layer.path] = layer
        elif index > last_in_block:
            fused_or_heads.append(layer)
    # A policy with 4 x D logits is a head if its module contains another head, such as the values of a critic.
    modules_with_heads = {_module_around(path) for path in heads}
    for layer in fused_or_heads:
        if _module_around(layer.path) in modules_with_heads:
            heads[layer.path] = layer
    return heads


def _module_around(path: str) -> str:
    """Return the path of the module that contains a layer, such as "blocks.0" for "blocks.0.fc"; "" is the model."""
    return path.rpartition(".")[0]


def _numbers_of_blocks(layers: Sequence[Layer]) -> set[int]:
    """Return the number of blocks in each list of at least two blocks."""
    blocks = {layer.block for layer in layers if layer.block is not None}
    blocks_in_list = Counter(_module_around(block) for block in blocks)
    return {count for count in blocks_in_list.values() if count > 1}


def _returns_parts(layer: Layer) -> bool:
    """Return True for a layer that returns several vectors of its own width, as a fused projection, or a modulation."""
    if layer.reads is None:
        return False
    multiples = {count * layer.reads for count in range(2, MOST_PARTS + 1)}
    return layer.returns in multiples or is_modulation(layer.path)


def _is_read_in_parts(layer: Layer, later_layers: Sequence[Layer]) -> bool:
    """Return True if a later layer of the same module reads half of the width, as in a gated MLP, or twice it."""
    widths = _widths_read_beside(layer, later_layers)
    return not widths.isdisjoint({layer.returns / 2, layer.returns * 2})


def _read_in_parts(layers: Sequence[Layer], read_widths: set[int]) -> dict[str, int]:
    """Return the number of vectors that a layer returns, 2 or 3, by the path of each layer that is read in parts.

    An MLP with a gate has the layers ``fc1``, which returns 2 x 64 features, and ``fc2``, which reads 64. The layer
    that reads a part is the next layer, or a later layer of the same module.
    """
    part_counts: dict[str, int] = {}
    for index, layer in enumerate(layers[:-1]):
        if layer.reads is None or layer.returns <= layer.reads:
            continue
        # Another layer may read the whole, by itself or concatenated with as many other features.
        if layer.returns in read_widths or 2 * layer.returns in read_widths:
            continue
        following = layers[index + 1]
        widths = _widths_read_beside(layer, layers[index + 1 :])
        if following.block == layer.block and following.reads is not None:
            widths.add(following.reads)
        # A layer that reads as many features may run on the same input as this layer, as a key does with a query.
        if not following.is_grouped:
            widths.discard(layer.reads)
        for count in _COUNTS_OF_PARTS:
            if layer.returns % count == 0 and layer.returns // count in widths:
                part_counts[layer.path] = count
    return part_counts


def _widths_read_beside(layer: Layer, later_layers: Sequence[Layer]) -> set[int]:
    """Return the widths that later layers of the same module read; the model itself is not such a module."""
    holder = _module_around(layer.path)
    if not holder:
        return set()
    return {later.reads for later in later_layers if later.reads and later.path.startswith(f"{holder}.")}


def _widths_of_norms(model: nn.Module) -> set[int]:
    """Return the lengths of the vectors that belong to no layer: the gains of norms, and similar."""
    return {norm.width for norm in _norms_of(model, set())}


def _norms_of(model: nn.Module, blocks: set[str]) -> Iterator[Norm]:
    """Yield the norms of a model, and other modules with vectors that belong to no layer."""
    for path, module in model.named_modules():
        if _widths_of(module) is not None:
            continue
        for param in module.parameters(recurse=False):
            if param.ndim == 1:
                yield Norm(param.shape[0], _block_around(path, blocks))


def _read_in_their_block(layers: Sequence[Layer]) -> frozenset[str]:
    """Return the paths of layers in blocks whose outputs another layer of the same block reads."""
    readers = Counter((layer.block, layer.reads) for layer in layers)
    read: set[str] = set()
    for layer in layers:
        count = readers[layer.block, layer.returns]
        if layer.reads == layer.returns:  # the layer itself is counted, which does not read its own outputs
            count -= 1
        if layer.block is not None and count > 0:
            read.add(layer.path)
    return frozenset(read)
