"""Settings of Sphinx for `make docs`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning_ort

# names that are imported when they are asked for; autodoc looks for them in the module
for _name in ("lightning_ort", "lightning_ort.ondevice"):
    _module = importlib.import_module(_name)
    vars(_module).update({name: getattr(_module, name) for name in _module.__all__})

project = "lightning_ort"
release = lightning_ort.__version__
copyright = "the authors of lightning_ort, Apache 2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"lightning_ort {release}"
html_show_sourcelink = False
html_domain_indices = False  # no page leads to it
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_heading_anchors = 3

# with what bases of this package have; those of others end it
_OTHERS = (
    "Accelerator", "BaseException", "Callback", "Enum", "LRScheduler", "LightningCLI", "Mapping", "Module",
    "MutableMapping", "Optimizer", "Precision", "SingleDeviceStrategy", "Strategy", "TorchCheckpointIO", "int",
    "object", "tuple",
)  # fmt: skip
autodoc_default_options = {"members": True, "inherited-members": ", ".join(_OTHERS)}
autodoc_inherit_docstrings = False  # those of torch and Lightning are theirs
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 100

# each reference must lead somewhere: to this site, or to what it has no pages of
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|contextlib|os|pathlib|torch|lightning|onnx|onnx_ir|onnxruntime|numpy|pl)\..*"),
    (
        r"py:.*",
        r"(Accelerator|CheckpointIO|Precision|MixedPrecision|MisconfigurationException|UnpicklingError|_DEVICE|_PATH)",
    ),  # Lightning's
    (r"py:.*", r"lightning_ort\.(compiler|optim\.settings|lightning_packages)\..*|lightning_ort\..*\._\w+"),
    (r"py:class", r"(list|dict|tuple)\[.*|Where"),  # halves of a type, and names of types
]
