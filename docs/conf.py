"""The documentation, built by `make docs`: every warning is an error, and no page fetches anything from elsewhere."""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent / "scripts"), str(HERE.parent)]

import muonfx  # noqa: E402

project = "muonfx"
author = "The muonfx authors"
copyright = "the muonfx authors"
version = release = muonfx.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    # our own, in docs/_extensions
    "api_pages",
    "arxiv_links",
    "code_needs",
    "code_references",
    "mathml",
    "narrow_pictures",
    "notebook_pages",
    "search_words",
]
root_doc = "index"
exclude_patterns = ["_*", "**/.ipynb_checkpoints"]
nitpicky = True

# ------------------------------------------------------------------------------------------------- Markdown, notebooks

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
nb_execution_mode = "off"  # what is committed is shown; `make notebooks` executes
# Sliders would be drawn by scripts from elsewhere; notebooks show a static picture beside them.
nb_ipywidgets_js = {}

# ---------------------------------------------------------------------------------------------------------- docstrings

default_role = "code_reference"
add_module_names = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "undoc-members": True}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Warns", "raises_style")]
trim_doctest_flags = True

# ----------------------------------------------------------------------------------------------------------- the pages

html_theme = "pydata_sphinx_theme"
html_title = "muonfx"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["muonfx.css"]
html_logo = "assets/logo.svg"
html_favicon = "assets/logo.svg"
html_math_renderer = "mathml"
html_search_scorer = str(HERE / "_static/scorer.js")
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_last_updated_fmt = None
html_context = {"default_mode": "auto"}  # light or dark as the reader's system is
html_theme_options = {
    "logo": {"text": "muonfx"},
    "icon_links": [{"name": "Repository", "url": "https://github.com/muonfx/muonfx", "icon": "fa-brands fa-github"}],
    "navbar_align": "left",
    "navbar_start": ["navbar-logo", "version"],
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "header_links_before_dropdown": 7,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "article_footer_items": [],
    "footer_start": ["copyright"],
    "footer_end": [],
    "back_to_top_button": True,
    "search_bar_text": "Search guides and API",
    "pygments_light_style": "github-light",
    "pygments_dark_style": "github-dark",
}
copybutton_exclude = ".linenos, .gp, .go"  # the prompt and what it answered stay behind

# The words by which a page is to be found first, where its title does not say them.
search_words = {
    "getting-started": ["install", "quickstart"],
    "torch-optimizer": ["torch.optim.lr_scheduler", "param groups", "GradScaler", "freeze", "unfreeze", "frozen"],
    "api/transforms-around": ["EMA", "exponential moving average", "gradient accumulation"],
    "api/schedules": ["schedule", "learning rate schedule", "cosine", "warmup"],
    "concepts/hyperparameters": ["learning rate", "learning rate schedule", "lr", "sweep"],
    "concepts/state": ["bf16", "bfloat16", "fp16", "fp32", "dtype", "int8", "fp8", "state dtype", "memory"],
    "concepts/numerics": ["bf16", "Newton-Schulz", "coefficients", "TF32"],
    "concepts/chains": ["gradient clipping"],
    "api/transforms-decay": ["clip", "clipping", "clip_grad_norm_"],
    "gpu": ["cuda", "GPU"],
    "checkpoint-reliability": ["checkpoint format"],
    "setting-the-numbers": ["weight decay", "nesterov", "momentum coefficient"],
    "widths": ["muP", "rate transfer", "coordinate check", "hyperparameter transfer"],
    "plateau-schedule-free-sam": ["ReduceLROnPlateau", "schedule-free", "sharpness", "SAM"],
    "mixed-precision": ["mixed precision", "autocast", "AMP"],
    "compile": ["torch.compile", "CUDA graphs"],
    "routing": ["embedding", "embeddings", "which parameters"],
    "fused-weights": ["per-head", "heads", "qkv", "moe", "experts", "mixture of experts"],
    "sharding": ["FSDP", "FSDP2", "fully_shard", "DTensor", "ZeRO", "DDP", "HSDP", "tensor parallel", "distributed"],
    "engines": ["FSDP", "DDP"],
    "deepspeed": ["DeepSpeed"],
    "huggingface": ["Trainer", "TRL", "SFTTrainer", "transformers"],
    "lightning": ["Fabric", "PyTorch Lightning"],
    "checkpoints": ["resume", "save", "load", "state_dict"],
    "local-steps": ["DiLoCo", "MuLoCo", "local SGD", "outer optimizer"],
    "meta-learning": ["MAML", "hypergradient", "bilevel", "differentiable optimizer", "unrolled"],
    "muonclip": ["QK-Clip", "attention logits"],
    "conversion": ["convert"],
    "coming-from-torchopt": ["posteriors", "MetaAdam", "variational inference"],
    "coming-from-dion-and-megatron": ["Megatron", "Emerging-Optimizers", "adjust_lr", "microsoft/dion"],
    "offload": ["offload", "CPU offload", "memory"],
    "muon-variants": ["NorMuon", "Dion", "Scion", "AdaMuon"],
}


def drop_modules_without_source(app: Any) -> list[Any]:
    """The list of source pages names only pages that are there: `builtins`, of a documented constant, has none."""
    listed = getattr(app.env, "_viewcode_modules", {})
    for name in [name for name, entry in listed.items() if not entry]:
        del listed[name]
    return []


def setup(app: Any) -> None:
    """Before viewcode, whose priority is the default of 500, makes its pages."""
    app.connect("html-collect-pages", drop_modules_without_source, priority=400)
