"""What heads read: a cell for each head with the sign of its role, the fuller the farther that is from chance."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Rectangle

from bnet_transformer.errors import one_of
from bnet_transformer.inference.heads.corpus_roles import Roles
from bnet_transformer.inference.heads.reading import OTHER
from bnet_transformer.tpm.arrays import in_numpy
from bnet_transformer.viz.plots.canvas import PAGE, Canvas
from bnet_transformer.viz.plots.heat import Map, heat_map, room, up_to
from bnet_transformer.viz.plots.table import numbers_of

SIGNS = {
    "same": "=",
    "previous": "←",
    "next": "→",
    "first": "⇤",
    "last": "⇥",
    "separator": "|",
    "same token": "≡",
    "earlier": "≪",
    "later": "≫",
    "other": "·",
}
SURE = 0.9  # the probability of a role from which it is written without a question mark
FAINTEST = 0.1  # how full the cell of a head is that reads by chance


def roles(result: Roles, canvas: Canvas, *, relation: str | None = None) -> None:
    """The role of each head, its sign over its share; or with `relation` that relation's share of each head."""
    one_of("relation", relation, (None, *result.relations))
    if relation is not None:
        _share(result, canvas, relation)
        return
    signs = signs_of(result.relations)
    colours = _colours(result.relations, canvas)
    rows, columns = result.probability.shape
    left = room(result.slices)
    across, down = min(PAGE - left - 1.6, max(1.2, 0.42 * columns)), min(7.0, max(0.5, 0.36 * rows))
    ax = canvas.axes(across + left + 1.6, down + 0.9)
    if canvas.given is not None:
        across, down = canvas.size(ax)
    _cells(result, canvas, ax, signs, colours, (across / columns, down / rows))
    canvas.words(ax, "x", [str(head) for head in range(columns)], across)
    canvas.words(ax, "y", result.slices, down)
    drawn = ", ".join(dict.fromkeys(name for name in result.selectors if name))
    canvas.named(ax, f"state of {drawn}" if drawn else "head")
    there = {name for row in result.role for name in row}
    handles = [Patch(facecolor=colours[n], label=f"{signs[n]}  {n}") for n in result.relations if n in there]
    canvas.legend(ax, handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0.0)
    s = "s" * (result.sentences != 1)
    canvas.headline(f"What heads read, by {result.sentences:,} sentence{s}", ax)
    canvas.note("In each cell the relation whose share of the reading is most above chance, over that share.")
    canvas.note(f"Full: all is read so. Faint: as by chance. ?: it is that relation with less than {SURE:.0%}.")


def signs_of(relations: tuple[str, ...]) -> dict[str, str]:
    """A sign for each relation: those of ours, and of others a letter that no other has.

    >>> signs_of(("previous", "verb", "vowel", "other"))
    {'previous': '←', 'verb': 'v', 'vowel': 'o', 'other': '·'}
    """
    found: dict[str, str] = {}
    for name in relations:
        letters = [*name, *name.upper(), *"0123456789"]
        free = next((x for x in letters if not x.isspace() and x not in found.values()), "?")
        found[name] = SIGNS.get(name, free)
    return found


def _colours(relations: tuple[str, ...], canvas: Canvas) -> dict[str, str]:
    """A colour for each relation: ours keep theirs, others take those left over, the rest of the reading is grey."""
    places = {name: k for k, name in enumerate(SIGNS) if name in relations}
    for name in relations:
        free = (k for k in range(len(relations) + len(SIGNS)) if k not in places.values())
        places.setdefault(name, next(free))
    return {n: canvas.heads[k % len(canvas.heads)] for n, k in places.items()} | {OTHER: canvas.colours["prior"]}


def _cells(
    result: Roles, canvas: Canvas, ax: Axes, signs: dict[str, str], colours: dict[str, str], side: tuple[float, float]
) -> None:
    """A rectangle for each head, with its sign and share where there is room."""
    rows, columns = result.probability.shape
    strength, sure, share = (in_numpy(x) for x in (result.strength, result.probability, result.of_role(result.mean)))
    paper, (wide, high) = np.array(to_rgb(canvas.colours["paper"])), side
    for t, h in np.ndindex(rows, columns):
        name = result.role[t][h]
        full = FAINTEST + (1 - FAINTEST) * strength[t, h]
        colour = tuple(full * np.array(to_rgb(colours[name])) + (1 - full) * paper)
        edge: Any = {"facecolor": colour, "edgecolor": canvas.colours["line"], "linewidth": 0.5}
        ax.add_patch(Rectangle((h - 0.46, t - 0.46), 0.92, 0.92, gid=f"head_{t}_{h}", **edge))
        both = wide >= 0.27 and high >= 0.26
        style: Any = {"ha": "center", "va": "center", "color": canvas.contrast(colour)}
        text = signs[name] + ("" if sure[t, h] >= SURE else "?")
        canvas.write(ax, h, t - (0.16 if both else 0), text, fontsize=min(9.0, 60 * min(wide, high)), **style)
        if both:
            canvas.write(ax, h, t + 0.24, f"{share[t, h]:.2f}".lstrip("0"), fontsize=5.5, **style)
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    canvas.framed(ax)


def _share(result: Roles, canvas: Canvas, relation: str) -> None:
    """The share of one relation in what each head reads."""
    r = result.relations.index(relation)
    mean, low, high, chance = (
        numbers_of(relation, x[..., r]) for x in (result.mean, result.low, result.high, result.chance)
    )
    heads = tuple(str(head) for head in range(mean.shape[1]))
    found = Map(mean, result.slices, heads)
    ax = heat_map(canvas, found, what=f"share of {relation}", x="head", y="", limits=up_to([mean]))
    canvas.headline(f"How much heads read the {relation} word" if relation != OTHER else "What else heads read", ax)
    canvas.note(
        f"By chance {chance.mean():.2f}. Intervals of {result.interval:.0%} are at most {(high - low).max():.2f} wide."
    )
