"""Write docs/worst.md of the rows of tests/worst: ``python docs/scripts/worst.py``; tests/test_worst.py runs them."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAD = """# The worst inputs

What a stranger would try: for each public function some of the worst inputs, and what happens. The law: a clear error
that says what was expected, what came and what is allowed, or the right answer. A test runs every row.

Left is the expression, right the class of the error with its first words, up to what came; what they mean and what to
do says [the page of errors](errors.md). `works:` is an answer, which the test checks as well. A file's folder is left
out (`…`). A keyword that a function does not have, or one that it needs and does not get, is Python's own `TypeError`.

| name | stands for |
|---|---|
"""


def page() -> str:
    """The page, as Markdown."""
    sys.path.insert(0, str(ROOT)) if str(ROOT) not in sys.path else None
    from tests.worst import PARTS, REASONS

    lines = [HEAD.rstrip("\n")]
    lines += [f"| `{name}` | {what} |" for name, what in NAMES.items()]
    for part in PARTS:
        lines += ["", f"## {(part.__doc__ or '').strip().rstrip('.')}"]
        for function, rows in part.ROWS.items():
            lines += ["", f"### {titled(function)}", "", "| input | what happens |", "|---|---|"]
            lines += [f"| {code(row[0])} | {told(row[1])} |" for row in rows]
    lines += ["", "## Without rows", "", "| name | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in sorted(REASONS.items())]
    return "\n".join(lines) + "\n"


NAMES = {
    "net": '`bt.bayesuvius(4, heads=3, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))`',
    "s": '`net.sentence("the cat sat")`',
    "plain": "`bt.bayesuvius(4)`, without a vocabulary",
    "real": "`bt.bayesuvius(4, observe=bt.tpm.Normal(1.0))`",
    "dec, both": "`bt.decoder` and `bt.encoder_decoder`, 8 wide, 2 heads, 1 slice, of these words",
    "vp": "`bt.volume_preserving(3, slices=1)`",
    "mini": '`bt.from_pretrained("minilm")`',
    "module, ids": "`net.module().eval()`, `torch.tensor([[0, 1, 2]])`",
    "clean, corrupt": "two sentences of `dec`",
    "swept, mediated, held, told": "`bt.sweep`, `bt.mediation` of these; `bt.inclusion`, `bt.roles` of `dec`",
    "fitted, trained": "`bt.fit(net, pairs)`, `bt.train(dec, ...)`",
    "boxes": "`s.shrink(lambda name: name[0])`",
    "folder, text, empty": "an empty folder, a file of six letters, a file of none",
    "saved, cut, flipped": "a file of `net`, one that lacks its end, one with a bit flipped",
    "of(tpm, *parents)": "a net with a node of that TPM; `x` has 4 numbers, `wide` 6, `odd` 3, `token` 3 states",
    "mine(...)": "a TPM of one's own",
    "under(default, ...)": "the same under `torch.set_default_dtype`, `set_default_device`, `inference_mode`",
    "at_once(...)": "what eight threads find that ask at the same moment",
    "later(..., told)": "what is made of an array, which is then filled with other numbers",
    "cli(...)": "the command line; `exit 2` is one line on the standard error",
}


def titled(function: str) -> str:
    """The title of a function's table."""
    return f"`bnet-transformer {function.removeprefix('cli ')}`" if function.startswith("cli ") else f"`{function}`"


def code(text: str) -> str:
    """Code in a cell of a table."""
    shown = text.replace("|", "\\|")
    return f"`` {shown} ``" if "`" in text else f"`{shown}`"


def told(happens: str) -> str:
    """What happens, in a cell: words where it works, else the message as it stands."""
    return happens if happens.startswith("works: ") else code(happens)


def main() -> None:
    """Write the page."""
    (ROOT / "docs" / "worst.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
