"""The command line, `bnet-transformer`.

In the order of a call: `group` imports the module of a command when the command is used; `signatures` makes its options
from the signatures of Python functions; `inputs` parses sentences, values and names; `nets`, `questions` and `learning`
have the commands; `outputs` prints and writes their results; `errors` turns an exception into one line on the standard
error and an exit code (1 for a bug, 2 for invalid input, 130 for an interrupt).
"""

try:
    from bnet_transformer.cli.group import main
except KeyboardInterrupt:  # Ctrl-C before click and the group could be imported
    import sys

    sys.stderr.write("interrupted\n")
    raise SystemExit(130) from None

__all__ = ["main"]
