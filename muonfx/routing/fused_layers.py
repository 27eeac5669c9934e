"""Find layers of known packages in the table `FUSED`, and the pattern that splits the weight of such a layer."""

from __future__ import annotations

import re
from math import prod

from torch import nn

from muonfx.routing.known_layers import FUSED, Fused
from muonfx.routing.params import written_type
from muonfx.routing.stored_patterns import PLAIN, in_equal_parts, in_parts, with_rows
from muonfx.transforms.matrix_pattern import parse


def fused_layer(name: str, holder: nn.Module | None) -> Fused | None:
    """Return the matrices that a layer of a known package concatenates, as an entry of a table; None for other layers.

    The entry for the layer "c_attn" in a ``GPT2Attention`` of transformers has the parts "query, key, value". In a
    class of the user's own code, "c_attn" has no entry, since its order may differ.

    Args:
        name: the name of the layer in the module that holds it, such as "c_attn".
        holder: this module; None for named tensors without a model.
    """
    if holder is None:
        return None
    holder_class = written_type(holder)
    for fused in FUSED:
        is_of_package = holder_class.__module__.startswith(fused.package)
        # The pattern is compared with "GPT2Attention:c_attn", for example.
        has_names = re.fullmatch(fused.layer, f"{holder_class.__name__}:{name}")
        if is_of_package and has_names and _has_attributes(holder, fused):
            return fused
    return None


def _has_attributes(holder: nn.Module, fused: Fused) -> bool:
    """Return True if a module has the attribute that an entry of the table requires, and not the one it excludes.

    An attribute counts if it is true. ``GPTBigCodeAttention`` has ``multi_query``, and an entry for each value.
    """
    if fused.requires is not None and not getattr(holder, fused.requires, None):
        return False
    return fused.excludes is None or not getattr(holder, fused.excludes, None)


def split_pattern(fused: Fused, stored: str, holder: nn.Module | None, rows: int) -> str | None:
    """Return the pattern that splits the weight of a known layer; None if the sizes do not fit its rows.

    Args:
        fused: the matrices that the layer concatenates: their names in ``parts``, and ``pattern``, ``sizes`` or
            ``count`` if they are not of equal sizes, one below the other.
        stored: the order of the parameter's dims, such as "{out} in -> {out} in", with "{out}" for the rows.
        holder: the module around the layer, which has the sizes of unequal matrices as attributes.
        rows: the number of rows of the parameter.

    >>> split_pattern(Fused("Attention:qkv", "query, key, value"), "{out} in -> {out} in", None, 24)
    '(part=3 out) in -> part out in'
    """
    # 1. The rows of the matrices alternate, by a pattern such as "(heads={num_heads} part=3 dim) -> part (heads dim)".
    if fused.pattern is not None:
        return _split_by_pattern(fused.pattern, stored, holder, rows)
    # 2. The matrices have different numbers of rows, which are attributes such as "num_heads*head_dim".
    part_names = fused.parts.split(", ")
    if fused.sizes is not None:
        sizes = [_number(holder, formula) for formula in fused.sizes]
        return _split_by_sizes(part_names, sizes, stored, rows)
    # 3. The matrices have equal numbers of rows.
    count = fused.count or len(part_names)
    if rows % count != 0:
        return None
    return in_equal_parts(stored, count)


def _split_by_sizes(part_names: list[str], sizes: list[int], stored: str, rows: int) -> str | None:
    """Return the pattern of parts of these numbers of rows, one after another; None if their sum is not ``rows``.

    >>> _split_by_sizes(["query", "key"], [16, 4], "{out} in -> {out} in", 20)
    '(query=16 + key=4) in -> query in, key in'
    """
    if sum(sizes) != rows or 0 in sizes:  # 0 is a missing attribute
        return None
    if len(set(sizes)) == 1:  # as many keys as queries, for example
        return in_equal_parts(stored, len(sizes))
    return in_parts(stored, dict(zip(part_names, sizes, strict=True)))


def _split_by_pattern(
    template: str, stored: str, holder: nn.Module | None, rows: int
) -> str | None:
    """Return the pattern that splits interleaved rows, with sizes that are attributes of a module; None if none fits.

    Here, a matrix of 48 rows is query, key and value for each of 8 heads. The number of heads is an attribute:

    >>> template = "(heads={in_features} part=3 dim) -> part (heads dim)"
    >>> _split_by_pattern(template, "{out} in -> {out} in", holder=nn.Linear(8, 4), rows=48)
    '(heads=8 part=3 dim) in -> part (heads dim) in'

    Args:
        template: a pattern of the rows alone, with names of attributes in braces.
        stored: the order of all dims of the parameter, with "{out}" for the rows.
        holder: the module with the attributes.
        rows: the number of rows of the parameter.
    """
    pattern_of_rows = _filled(template, holder)  # "(heads=8 part=3 dim) -> part (heads dim)"
    if pattern_of_rows is None:  # the module lacks an attribute
        return None
    # "(heads=8 part=3 dim)" and ["part (heads dim)"]
    all_rows, _, matrices_text = pattern_of_rows.partition(" -> ")
    rows_of_matrices = matrices_text.split(", ")
    # Do 48 rows divide by 8 heads and 3 parts? Try the pattern on a plain matrix of 48 rows and one column.
    plain_pattern = with_rows(PLAIN, all_rows, rows_of_matrices)
    if not parse(plain_pattern).fits((rows, 1)):
        return None
    return with_rows(stored, all_rows, rows_of_matrices)


def _filled(template: str, holder: nn.Module | None) -> str | None:
    """Replace each formula in braces by its value, an attribute of a module; None if the module has no such size.

    >>> _filled("(heads={in_features} dim) -> heads dim", nn.Linear(8, 64))
    '(heads=8 dim) -> heads dim'
    """
    pattern = template
    for formula in re.findall(r"{(.*?)}", template):  # such as "num_heads"
        size = _number(holder, formula)
        if size == 0:
            return None
        pattern = pattern.replace("{" + formula + "}", str(size))
    return pattern


def _number(module: nn.Module | None, formula: str) -> int:
    """Return the value of a formula of module attributes; 0 if one is missing, or a division has a remainder.

    The formulas are the entries of a table of known layers, such as "config.num_heads*head_dim" or
    "num_heads//num_kv_heads": factors with "*" between them, and at most one divisor.

    >>> (
    ...     _number(nn.Linear(6, 4), "in_features*out_features"),
    ...     _number(nn.Linear(6, 4), "in_features//out_features"),
    ... )
    (24, 0)
    """
    product, _, divisor_name = formula.partition("//")  # without "//", the divisor is ""
    dividend = prod(_size(module, factor) for factor in product.split("*"))
    if not divisor_name:
        return dividend
    divisor = _size(module, divisor_name)
    if divisor == 0 or dividend % divisor != 0:
        return 0
    return dividend // divisor


def _size(module: nn.Module | None, path: str) -> int:
    """Return the attribute "head_dim", or "config.num_heads", of a module; 0 if it is missing or no integer."""
    value: object = module
    for name in path.split("."):
        value = getattr(value, name, 0)
    return value if isinstance(value, int) else 0
