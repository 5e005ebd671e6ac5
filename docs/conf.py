"""The Sphinx configuration of the site that `make docs` builds from the pages, the notebooks and the docstrings.

The source folder is the whole repository, so that a relative link works in the site and in plain Markdown.
"""

import inspect
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "scripts"))

from public_objects import import_entry, iter_members, list_reference  # noqa: E402

from bnet_transformer import __version__  # noqa: E402

project = "bnet_transformer"
author = "The bnet_transformer authors"
project_copyright = f"{author}; Apache-2.0"
release = version = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "rendering"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "docs/api/generated/*.rst", "notebooks/*.ipynb", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [".*", "build", "demo", "dist", "bnet_transformer", "tests", "benchmarks", "experiments"]
nitpicky = True
# Types of other packages are plain text in signatures, because the build uses no network.
nitpick_ignore_regex = [("py:class", ".*")]

# A link to a file that is not a page leads to the repository if its address is known, or downloads the file.
repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Repository")

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True

# One page for each entry of docs/api/index.md, with the members that users call.
reference = {path: import_entry(path) for path in list_reference()}
templates_path = [str(ROOT / "docs" / "templates")]
autosummary_generate = ["docs/api/index.md"]
autosummary_context = {
    "public_members": {
        path: [name for name, _ in iter_members(obj)] for path, obj in reference.items() if inspect.isclass(obj)
    },
    # The classes that users construct; the signatures of the others, which the library returns, are not shown.
    "constructed": [path for path, obj in reference.items() if "\nArgs:" in (inspect.getdoc(obj) or "")],
}
# `Fit` and `fit` are one file where a file system ignores case.
lower = [path.lower() for path in reference]
autosummary_filename_map = {
    path: f"{path}-class" for path, obj in reference.items() if lower.count(path.lower()) > 1 and inspect.isclass(obj)
}
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False  # Args:, Returns:, Raises:
napoleon_use_ivar = True
autodoc_typehints = "signature"
add_module_names = False
python_maximum_signature_line_length = 88
toc_object_entries = False

html_theme = "furo"
html_title = "bnet_transformer"
html_math_renderer = "mathml"  # defined in `rendering`: the page contains the formulas and loads no script
html_show_sourcelink = False
html_copy_source = False
html_extra_path = ["site"]
html_static_path = ["static"]
html_css_files = ["site.css"]
pygments_style = "default"
pygments_dark_style = "github-dark"
