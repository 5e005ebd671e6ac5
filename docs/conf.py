"""How Sphinx makes the site of `make docs`: of the pages as they stand, the notebooks with their outputs, the package.

Its source folder is the whole repository, so that one relative link serves the site and plain Markdown alike.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "scripts"))

from bnet_transformer import __version__  # noqa: E402

project = "bnet_transformer"
author = "The bnet_transformer authors"
project_copyright = f"{author}; Apache-2.0"
release = version = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "rendering"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "notebooks/*.ipynb", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [".*", "build", "demo", "dist", "bnet_transformer", "tests", "benchmarks", "experiments"]
nitpicky = True
# A type of somebody else's stands as text in a signature: the site needs no network to be made.
nitpick_ignore_regex = [("py:class", ".*")]

# Where files that are no pages lead to: the repository, where its address is known; else the file is downloaded.
repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Repository")

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True

autodoc_member_order = "bysource"
napoleon_numpy_docstring = False  # Args:, Returns:, Raises:
napoleon_use_ivar = True
autodoc_typehints = "signature"
add_module_names = False
python_maximum_signature_line_length = 88
toc_object_entries = False

html_theme = "furo"
html_title = "bnet_transformer"
html_math_renderer = "mathml"  # of `rendering`: mathematics is in the page, and nothing is fetched to show it
html_show_sourcelink = False
html_copy_source = False
html_extra_path = ["site"]
html_static_path = ["static"]
html_css_files = ["site.css"]
pygments_style = "default"
pygments_dark_style = "github-dark"
