"""The public face that laws about every factory enumerate: the names of `muonfx` and of `muonfx.contrib`."""

import muonfx as mfx

NAMES = {name: getattr(module, name) for module in (mfx.contrib, mfx) for name in module.__all__}
