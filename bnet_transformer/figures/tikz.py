"""Writes pictures as LaTeX: a complete document with a TikZ figure and, for a net, the structural equations below it.

The document is plain ASCII and compiles with pdflatex and lualatex. If pdflatex lacks a character, it shows the code
point.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping

from bnet_transformer.equations import PAGE_SETUP
from bnet_transformer.figures.attention_grid import STATE_SIZE
from bnet_transformer.figures.fonts import SCRIPT_SCALE, TextRun
from bnet_transformer.figures.picture import (
    DASH_PATTERNS,
    FADED_OPACITY,
    LABEL_SIZE,
    Frame,
    NodeBox,
    Picture,
    PictureArrow,
    TextLine,
    border_colour,
    box_outlines,
    get_palette,
    split_arrow_head,
)

MAX_WIDTH = 495.0  # of the text area, in TeX points
MAX_HEIGHT = 620.0
LABEL_MARGIN = 6.0  # of a label in its box
GENERIC_FAMILIES: Mapping[str, str] = {
    "serif": r"\let\sfdefault\rmdefault",
    "sans-serif": r"\let\rmdefault\sfdefault",
    "monospace": r"\let\rmdefault\ttdefault\let\sfdefault\ttdefault",
}

PREAMBLE = r"""\documentclass{article}
\IfFileExists{lmodern.sty}{\usepackage[T1]{fontenc}\usepackage{lmodern}}{}
\usepackage{amsmath,amssymb,tikz}
\ProvideTextCommandDefault{\textquotedbl}{''}
\usepackage{iftex}
\ifPDFTeX\else
\usepackage{fontspec}
\IfFontExistsTF{DejaVu Sans}{\newfontfamily\bnetfont{DejaVu Sans}}{\let\bnetfont\relax}
\fi
% the character with a code point; with pdflatex, the code point as text
\newcommand{\bnetletter}[1]{\ifPDFTeX{\tiny\texttt{U+#1}}\else{\bnetfont\char"#1}\fi}
% a label, scaled down if it is wider than its box
\newcommand{\bnetfit}[2]{\sbox0{#2}\ifdim\wd0>#1\resizebox{#1}{!}{\usebox0}\else\usebox0\fi}
"""
LATEX_ESCAPES: Mapping[str, str] = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    '"': r"\textquotedbl{}",
    "$": r"{\char36}",  # the character itself: `\$` requires a font that a small LaTeX installation lacks
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{letter: "\\" + letter for letter in "#%&_{}"},
    **{letter: "{" + letter + "}" for letter in "'`-?!,"},  # in braces, these form no ligature and end no option
    "“": r"\textquotedblleft{}",
    "”": r"\textquotedblright{}",
    "…": r"\dots{}",
    "×": r"$\times$",
    "∅": r"$\emptyset$",
    "␣": r"\textvisiblespace{}",
    "·": r"$\cdot$",
    "→": r"$\to$",
    "≥": r"$\geq$",
    "ß": r"\ss{}",
    "æ": r"\ae{}",
    "œ": r"\oe{}",
    "ø": r"\o{}",
    "ł": r"\l{}",
    "’": "{'}",
    "–": "{--}",
    "—": "{---}",
}
LATEX_ACCENTS = {
    "\u0300": "`",
    "\u0301": "'",
    "\u0302": "^",
    "\u0303": "~",
    "\u0308": '"',
    "\u030c": "v",
    "\u0327": "c",
}


def to_tikz(picture: Picture, equations: str = "") -> str:
    """The picture as a LaTeX document, with the LaTeX of `equations` below it."""
    colours = get_palette("light" if picture.theme == "auto" else picture.theme)
    parts = [PREAMBLE + PAGE_SETUP]
    if picture.scale is not None:  # a page on which the figure fits, and the sizes of scripts in SVG
        width, height = picture.width * picture.scale, picture.height * picture.scale
        if width > MAX_WIDTH or height > MAX_HEIGHT:
            paper = f"paperwidth={max(width, MAX_WIDTH) + 60:.2f}bp,paperheight={max(height, MAX_HEIGHT) + 120:.2f}bp"
            parts.append(rf"\usepackage[{paper},margin=30bp]{{geometry}}")
        for size in (LABEL_SIZE, STATE_SIZE):  # by default, TeX has smaller scripts, which are below the minimum size
            script = SCRIPT_SCALE * size
            parts.append(rf"\DeclareMathSizes{{{size:g}}}{{{size:g}}}{{{script:g}}}{{{script:g}}}")
    if picture.font is not None:  # pdflatex has no fonts of the system and uses its own
        name = escape_tex(picture.font)
        named_font = rf"\ifPDFTeX\else\IfFontExistsTF{{{name}}}{{\setmainfont{{{name}}}\setsansfont{{{name}}}}}{{}}\fi"
        parts.append(GENERIC_FAMILIES.get(picture.font, named_font))
    parts += [rf"\definecolor{{bnet{name}}}{{HTML}}{{{value[1:].upper()}}}" for name, value in colours.items()]
    parts += [r"\begin{document}", *render_tikzpicture(picture)]
    if equations:
        parts += [r"\bigskip", equations]
    return "\n".join([*parts, r"\end{document}"]) + "\n"


def render_tikzpicture(picture: Picture) -> Iterator[str]:
    """The lines of the `tikzpicture`, in its physical width or scaled to fit a page."""
    scale = picture.scale
    if scale is None:
        scale = min(1.0, MAX_WIDTH / max(picture.width, 1.0), MAX_HEIGHT / max(picture.height, 1.0))
    yield r"\begin{center}"
    yield (
        rf"\begin{{tikzpicture}}[x={scale:.4f}bp,y=-{scale:.4f}bp,every node/.style={{inner sep=0pt,outer sep=0pt,"
        rf"transform shape=false,scale={scale:.4f}}},line cap=butt,text=bnetink]"
    )
    if picture.scale is not None:
        yield rf"\useasboundingbox (0,0) rectangle ({picture.width:.4f},{picture.height:.4f});"
    if picture.theme == "dark":
        yield rf"\fill[bnetpaper] (0,0) rectangle ({picture.width:.2f},{picture.height:.2f});"
    for frame in picture.frames:
        yield _render_frame(frame, scale)
    for arrow in picture.arrows:
        yield _render_arrow(arrow, scale)
    for box in picture.boxes:
        yield from _render_box(box, scale)
    for entry in picture.legend:
        yield from (
            _render_box(entry.handle, scale)
            if isinstance(entry.handle, NodeBox)
            else [_render_arrow(entry.handle, scale)]
        )
    for line in picture.lines:
        yield _render_text(line)
    yield r"\end{tikzpicture}"
    yield r"\end{center}"


def escape_tex(text: str) -> str:
    r"""Escape text such that TeX shows it literally; the result is ASCII.

    >>> escape_tex("50% of \\input{x}"), escape_tex("é ш")
    ('50\\% of \\textbackslash{}input\\{x\\}', "\\'{e} \\bnetletter{0448}")
    """
    return "".join(map(_escape_letter, text))


def _escape_letter(letter: str) -> str:
    """One character as TeX that shows it literally."""
    if letter in LATEX_ESCAPES:
        return LATEX_ESCAPES[letter]
    if letter.isascii() and letter.isprintable():
        return letter
    base, *marks = tuple(unicodedata.normalize("NFD", letter))
    if len(marks) == 1 and marks[0] in LATEX_ACCENTS and base.isascii() and base.isalpha():
        base_letter = {"i": r"\i", "j": r"\j"}.get(base, base) if marks[0] != "\u0327" else base
        return f"\\{LATEX_ACCENTS[marks[0]]}{{{base_letter}}}"
    return f"\\bnetletter{{{ord(letter):04X}}}"


def _render_label(label: tuple[TextRun, ...]) -> str:
    """A label as TeX."""
    parts = []
    for run in label:
        text, mark = escape_tex(run.text), {"sub": "_", "sup": "^"}.get(run.style)
        if mark:
            parts.append(rf"${mark}{{\text{{{text}}}}}$")
        elif run.style == "math":
            parts.append(rf"$\mathit{{{text}}}$" if run.text.isascii() and run.text.isalnum() else text)
        else:
            parts.append(rf"\text{'rm' if run.style == 'name' else 'sf'}{{{text}}}")
    return "".join(parts).replace("$$", "")  # one math group, so that subscript and superscript are aligned


def _font_option(size: float) -> str:
    """The TikZ option for a font size."""
    return rf"font=\fontsize{{{size:g}}}{{{1.2 * size:g}}}\selectfont"


def _render_box(box: NodeBox, scale: float) -> Iterator[str]:
    """The TikZ commands of a box."""
    left, top, right, bottom = box.bounds
    line = f"bnet{border_colour(box)}"
    opacity = f",opacity={FADED_OPACITY}" if box.is_faded else ""
    if box.border == "dot":
        yield rf"\fill[{line}{opacity}] ({box.x:.2f},{box.y:.2f}) circle [radius={box.width / 2:.2f}];"
    else:
        dash = f",dash pattern=on {3.2 * scale:.2f}bp off {2 * scale:.2f}bp" if box.is_dashed else ""
        style = f"draw={line},rounded corners={4 * scale:.2f}bp{dash}{opacity}"
        for start, end, width in box_outlines(box):
            fill = f",fill=bnet{box.fill}" if end >= 0 else ""
            rectangle = f"({left + start:.2f},{top + start:.2f}) rectangle ({right + end:.2f},{bottom + end:.2f})"
            yield rf"\path[{style}{fill},line width={width * scale:.2f}bp] {rectangle};"
    if box.label:
        content = rf"\bnetfit{{{box.width - LABEL_MARGIN:.1f}bp}}{{{_render_label(box.label)}}}"
        yield rf"\node[{_font_option(LABEL_SIZE)}{opacity}] at ({box.x:.2f},{box.y:.2f}) {{{content}}};"


def _render_arrow(arrow: PictureArrow, scale: float) -> str:
    """The TikZ commands of an arrow."""
    points, head = split_arrow_head(arrow)
    path = _format_point(points[0])
    for one, two, end in zip(points[1::3], points[2::3], points[3::3], strict=True):
        path += f" .. controls {_format_point(one)} and {_format_point(two)} .. {_format_point(end)}"
    dash, width = DASH_PATTERNS[arrow.dash], max(arrow.width, 0.8) * scale
    dashed = f",dash pattern=on {dash[0] * width:.2f}bp off {dash[1] * width:.2f}bp" if dash else ""
    style = f"bnet{arrow.colour},opacity={arrow.opacity:.2f}"
    line = rf"\draw[{style},line width={arrow.width * scale:.2f}bp{dashed}] {path};"
    return line + (rf" \fill[{style}] {' -- '.join(map(_format_point, head))} -- cycle;" if head else "")


def _format_point(point: tuple[float, float]) -> str:
    """A point as TikZ coordinates."""
    return f"({point[0]:.2f},{point[1]:.2f})"


def _render_frame(frame: Frame, scale: float) -> str:
    """The TikZ command of a frame."""
    right, bottom = frame.x + frame.width, frame.y + frame.height
    if frame.kind == "line":
        ends = f"({frame.x:.2f},{frame.y:.2f}) -- ({frame.x:.2f},{bottom:.2f})"
        return rf"\draw[bnetgrey,line width={0.8 * scale:.2f}bp] {ends};"
    colour, width = ("accent", 1.3) if frame.kind == "box" else ("grey", 0.7)
    style = f"bnet{colour},rounded corners={7 * scale:.2f}bp,line width={width * scale:.2f}bp"
    return rf"\draw[{style}] ({frame.x:.2f},{frame.y:.2f}) rectangle ({right:.2f},{bottom:.2f});"


def _render_text(line: TextLine) -> str:
    """The TikZ command of a line of text."""
    anchor = {"start": "west", "middle": "center", "end": "east"}[line.anchor]
    style = f"anchor={anchor},text=bnet{line.colour},{_font_option(line.size)}"
    return rf"\node[{style}] at ({line.x:.2f},{line.y:.2f}) {{{_render_label(line.runs)}}};"
