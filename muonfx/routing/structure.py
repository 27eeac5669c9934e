"""Read the structure of a model: its layers in the order of definition, its blocks, its first and its last layers.

A module has no record of the order in which its layers run. The order of definition, the widths that layers read and
return, and the lists of blocks are known without running the model:

- A *layer* is a linear layer or a convolution. It reads vectors of one width, and returns vectors of another width.
- A *block* is a module with children in an ``nn.ModuleList``, or one of several such modules of the same class in an
  ``nn.Sequential``. Blocks are the body of a model. An ``nn.Sequential`` whose last layer returns what no other layer
  reads is no block, but one of several heads.
- An *input* is a layer before the blocks of its part of the model, if no earlier layer returns what it reads, whole or
  concatenated. The part is the innermost module around it that contains blocks.
- A *head* is a layer after the first block, outside all blocks, whose outputs no other layer reads, whole or in parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

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
    possible_head: str | None = None
    """The path of the last layer of a model, if it may be a head: without blocks, a head cannot be distinguished."""


UNKNOWN_STRUCTURE = Structure()
"""The structure of named tensors without a model."""


def structure_of(model: nn.Module) -> Structure:
    """Return the structure of a model, from the modules that it defines; the model is not run."""
    held_by_no_layer = frozenset(_held_by_no_layer(model))
    read_widths = _read_widths(model)
    layers = list(_layers_of(model, read_widths))
    possible_head = _possible_head(layers, read_widths)
    if all(layer.block is None for layer in layers):
        return Structure(held_by_no_layer, possible_head=possible_head)
    inputs = _inputs(layers)
    heads = _heads(layers, inputs, _widths_of_norms(model), _numbers_of_blocks(layers))
    return Structure(held_by_no_layer, inputs, heads, _read_in_their_block(layers), possible_head)


def _possible_head(layers: list[Layer], read_widths: set[int]) -> str | None:
    """Return the path of the last layer, unless it is an embedding, the whole model, or a part of a body."""
    if not layers or layers[-1].reads is None or layers[-1].path == "":
        return None
    last = layers[-1]
    has_blocks = any(layer.block is not None for layer in layers)
    if has_blocks and (last.block is None or last.returns in read_widths or _returns_parts(last)):
        return None
    return last.path


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


def _layers_of(model: nn.Module, read_widths: set[int]) -> Iterator[Layer]:
    """Yield the layers and embeddings of a model in the order of definition, each with the block that it is in.

    ``read_widths`` are the widths that some layer or norm reads; `_blocks_of` needs them.
    """
    blocks = set(_blocks_of(model, read_widths))
    for path, module in model.named_modules():
        blocks_around = [ancestor for ancestor in _with_ancestors(path) if ancestor in blocks]
        block = blocks_around[0] if blocks_around else None  # the outermost, since blocks may be nested
        if widths := _widths_of(module):
            reads, returns = widths
            yield Layer(path, reads, returns, block)
        elif isinstance(module, nn.Embedding) or class_name_fits(type(module), _EMBEDDING_CLASS):
            width = getattr(module, "embedding_dim", None)
            if isinstance(width, int):
                yield Layer(path, None, width, block)


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
    parts = path.split(".") if path else []
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def _inputs(layers: list[Layer]) -> dict[str, Layer]:
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


def _first_in_blocks(layers: list[Layer]) -> dict[str, int]:
    """Return the index of the first layer in a block, for the path of each module that contains blocks.

    It is {"": 1, "encoder": 1, "decoder": 9} if the first block of the encoder begins with layer 1, and that of the
    decoder with layer 9.
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


def _heads(
    layers: list[Layer], inputs: dict[str, Layer], widths_of_norms: set[int], numbers_of_blocks: set[int]
) -> dict[str, Layer]:
    """Return the heads by path: layers after the first block, outside all blocks, whose outputs nothing reads.

    Args:
        layers: the layers of the model in the order of definition, some of them in blocks.
        inputs: those that read raw input, which are no heads.
        widths_of_norms: the widths that norms read.
        numbers_of_blocks: the number of blocks in each list of blocks. A layer may return a slice for each of them.
    """
    # A model of images or actions may read and return one raw width: an input does not read what a head returns.
    read_widths = widths_of_norms | {layer.reads for layer in layers if layer.path not in inputs and layer.reads}
    widths_of_slices = {count * width for count in numbers_of_blocks for width in read_widths}
    heads: dict[str, Layer] = {}
    for index in range(_first_in_blocks(layers)[""], len(layers)):
        layer = layers[index]
        if layer.reads is None or layer.block is not None or layer.path in inputs:
            continue
        if layer.returns == layer.reads or layer.returns in read_widths | widths_of_slices:
            continue
        if not _returns_parts(layer) and not _is_read_in_parts(layer, layers[index + 1 :]):
            heads[layer.path] = layer
    return heads


def _numbers_of_blocks(layers: list[Layer]) -> set[int]:
    """Return the number of blocks in each list of at least two blocks."""
    blocks = {layer.block for layer in layers if layer.block is not None}
    return {count for count in Counter(block.rpartition(".")[0] for block in blocks).values() if count > 1}


def _returns_parts(layer: Layer) -> bool:
    """Return True for a layer that returns several vectors of its own width, as a fused projection, or a modulation."""
    if layer.reads is None:
        return False
    multiples = {count * layer.reads for count in range(2, MOST_PARTS + 1)}
    return layer.returns in multiples or is_modulation(layer.path)


def _is_read_in_parts(layer: Layer, later_layers: list[Layer]) -> bool:
    """Return True if a later layer of the same module reads half of the width, as in a gated MLP, or twice it."""
    holder = layer.path.rpartition(".")[0]
    if not holder:
        return False
    read_widths = {later.reads for later in later_layers if later.path.startswith(f"{holder}.")}
    return not read_widths.isdisjoint({layer.returns / 2, layer.returns * 2})


def _widths_of_norms(model: nn.Module) -> set[int]:
    """Return the lengths of the vectors that belong to no layer: the gains of norms, and similar."""
    widths: set[int] = set()
    for module in model.modules():
        if _widths_of(module) is not None:
            continue
        for param in module.parameters(recurse=False):
            if param.ndim == 1:
                widths.add(param.shape[0])
    return widths


def _read_in_their_block(layers: list[Layer]) -> frozenset[str]:
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
