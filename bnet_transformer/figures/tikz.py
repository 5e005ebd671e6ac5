"""Pictures as LaTeX: a document of its own with a TikZ figure and, of a net, the structural equations beside it.

It is plain ASCII and compiles with pdflatex and lualatex. What pdflatex has no letter for is shown by its code point.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping

from bnet_transformer.equations import PAGE_SETUP
from bnet_transformer.figures.labels import Run
from bnet_transformer.figures.picture import DASHES, Arrow, Box, Frame, Picture, Text
from bnet_transformer.figures.style import FADED, SIZE, line_and_head, line_colour, outlines, palette

PAGE = 495.0  # points of TeX that the text is wide
TALL = 620.0

HEAD = r"""\documentclass{article}
\IfFileExists{lmodern.sty}{\usepackage[T1]{fontenc}\usepackage{lmodern}}{}
\usepackage{amsmath,amssymb,tikz}
\ProvideTextCommandDefault{\textquotedbl}{''}
\usepackage{iftex}
\ifPDFTeX\else
\usepackage{fontspec}
\IfFontExistsTF{DejaVu Sans}{\newfontfamily\bnetfont{DejaVu Sans}}{\let\bnetfont\relax}
\fi
% a letter by its code point: itself, or under pdflatex its number
\newcommand{\bnetletter}[1]{\ifPDFTeX{\tiny\texttt{U+#1}}\else{\bnetfont\char"#1}\fi}
% a label, made smaller where it is wider than its box
\newcommand{\bnetfit}[2]{\sbox0{#2}\ifdim\wd0>#1\resizebox{#1}{!}{\usebox0}\else\usebox0\fi}
"""
SPECIAL: Mapping[str, str] = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    '"': r"\textquotedbl{}",
    "$": r"{\char36}",  # the symbol itself: `\$` asks for a font that a small LaTeX has not
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{letter: "\\" + letter for letter in "#%&_{}"},
    **{letter: "{" + letter + "}" for letter in "'`-?!,"},  # alone: no ligature, no end of an option
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
ACCENTS = {"\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0308": '"', "\u030c": "v", "\u0327": "c"}


def to_tikz(picture: Picture, equations: str = "") -> str:
    """The picture as a LaTeX document; `equations` is LaTeX that stands below it."""
    colours = palette("light" if picture.theme == "auto" else picture.theme)
    parts = [HEAD + PAGE_SETUP]
    parts += [rf"\definecolor{{bnet{name}}}{{HTML}}{{{value[1:].upper()}}}" for name, value in colours.items()]
    parts += [r"\begin{document}", *figure(picture)]
    if equations:
        parts += [r"\bigskip", equations]
    return "\n".join([*parts, r"\end{document}"]) + "\n"


def figure(picture: Picture) -> Iterator[str]:
    """The lines of the `tikzpicture`, as wide as a page at most."""
    scale = min(1.0, PAGE / max(picture.width, 1.0), TALL / max(picture.height, 1.0))
    yield r"\begin{center}"
    yield (
        rf"\begin{{tikzpicture}}[x={scale:.4f}bp,y=-{scale:.4f}bp,every node/.style={{inner sep=0pt,outer sep=0pt,"
        rf"transform shape=false,scale={scale:.4f}}},line cap=butt,text=bnetink]"
    )
    if picture.theme == "dark":
        yield rf"\fill[bnetpaper] (0,0) rectangle ({picture.width:.2f},{picture.height:.2f});"
    for frame in picture.frames:
        yield _frame(frame, scale)
    for arrow in picture.arrows:
        yield _arrow(arrow, scale)
    for box in picture.boxes:
        yield from _box(box, scale)
    for entry in picture.legend:
        yield from _box(entry.sample, scale) if isinstance(entry.sample, Box) else [_arrow(entry.sample, scale)]
    for line in picture.lines:
        yield _text(line)
    yield r"\end{tikzpicture}"
    yield r"\end{center}"


def letters(text: str) -> str:
    r"""Text that TeX shows literally, in ASCII.

    >>> letters("50% of \\input{x}"), letters("é ш")
    ('50\\% of \\textbackslash{}input\\{x\\}', "\\'{e} \\bnetletter{0448}")
    """
    return "".join(map(_letter, text))


def _letter(letter: str) -> str:
    if letter in SPECIAL:
        return SPECIAL[letter]
    if letter.isascii() and letter.isprintable():
        return letter
    base, *marks = tuple(unicodedata.normalize("NFD", letter))
    if len(marks) == 1 and marks[0] in ACCENTS and base.isascii() and base.isalpha():
        plainly = {"i": r"\i", "j": r"\j"}.get(base, base) if marks[0] != "\u0327" else base
        return f"\\{ACCENTS[marks[0]]}{{{plainly}}}"
    return f"\\bnetletter{{{ord(letter):04X}}}"


def _label(label: tuple[Run, ...]) -> str:
    parts = []
    for run in label:
        text, mark = letters(run.text), {"sub": "_", "sup": "^"}.get(run.style)
        if mark:
            parts.append(rf"${mark}{{\text{{{text}}}}}$")
        elif run.style == "math":
            parts.append(rf"$\mathit{{{text}}}$" if run.text.isascii() and run.text.isalnum() else text)
        else:
            parts.append(rf"\text{'rm' if run.style == 'name' else 'sf'}{{{text}}}")
    return "".join(parts).replace("$$", "")  # a subscript and the superscript after it stand above one another


def _font(size: float) -> str:
    return rf"font=\fontsize{{{size:g}}}{{{1.2 * size:g}}}\selectfont"


def _box(box: Box, scale: float) -> Iterator[str]:
    left, top, right, bottom = box.edges
    line = f"bnet{line_colour(box)}"
    opacity = f",opacity={FADED}" if box.faded else ""
    if box.border == "dot":
        yield rf"\fill[{line}{opacity}] ({box.x:.2f},{box.y:.2f}) circle [radius={box.width / 2:.2f}];"
    else:
        dash = f",dash pattern=on {3.2 * scale:.2f}bp off {2 * scale:.2f}bp" if box.dashed else ""
        look = f"draw={line},rounded corners={4 * scale:.2f}bp{dash}{opacity}"
        for start, end, thick in outlines(box):
            fill = f",fill=bnet{box.fill}" if end >= 0 else ""
            place = f"({left + start:.2f},{top + start:.2f}) rectangle ({right + end:.2f},{bottom + end:.2f})"
            yield rf"\path[{look}{fill},line width={thick * scale:.2f}bp] {place};"
    if box.label:
        said = rf"\bnetfit{{{box.width - 8:.1f}bp}}{{{_label(box.label)}}}"
        yield rf"\node[{_font(SIZE)}{opacity}] at ({box.x:.2f},{box.y:.2f}) {{{said}}};"


def _arrow(arrow: Arrow, scale: float) -> str:
    points, head = line_and_head(arrow)
    way = _p(points[0])
    for one, two, end in zip(points[1::3], points[2::3], points[3::3], strict=True):
        way += f" .. controls {_p(one)} and {_p(two)} .. {_p(end)}"
    dash, width = DASHES[arrow.dash], max(arrow.width, 0.8) * scale
    dashed = f",dash pattern=on {dash[0] * width:.2f}bp off {dash[1] * width:.2f}bp" if dash else ""
    look = f"bnet{arrow.colour},opacity={arrow.opacity:.2f}"
    line = rf"\draw[{look},line width={arrow.width * scale:.2f}bp{dashed}] {way};"
    return line + (rf" \fill[{look}] {' -- '.join(map(_p, head))} -- cycle;" if head else "")


def _p(point: tuple[float, float]) -> str:
    return f"({point[0]:.2f},{point[1]:.2f})"


def _frame(frame: Frame, scale: float) -> str:
    right, bottom = frame.x + frame.width, frame.y + frame.height
    if frame.kind == "line":
        ends = f"({frame.x:.2f},{frame.y:.2f}) -- ({frame.x:.2f},{bottom:.2f})"
        return rf"\draw[bnetgrey,line width={0.8 * scale:.2f}bp] {ends};"
    colour, thick = ("accent", 1.3) if frame.kind == "box" else ("grey", 0.7)
    look = f"bnet{colour},rounded corners={7 * scale:.2f}bp,line width={thick * scale:.2f}bp"
    return rf"\draw[{look}] ({frame.x:.2f},{frame.y:.2f}) rectangle ({right:.2f},{bottom:.2f});"


def _text(line: Text) -> str:
    anchor = {"start": "west", "middle": "center", "end": "east"}[line.anchor]
    look = f"anchor={anchor},text=bnet{line.colour},{_font(line.size)}"
    return rf"\node[{look}] at ({line.x:.2f},{line.y:.2f}) {{{_label(line.runs)}}};"
