"""The command line, `bnet-transformer`: one room for each command, imported when it is used.

Bad input is one clear line on the standard error and exit code 2, an interrupt 130. `group` runs a command and tells
its errors (`telling`); `shared` has the options, the net and the sentences of all commands, `lines` texts to learn
from, `outputs` what is printed and written.
"""

try:
    from bnet_transformer.cli.group import main
except KeyboardInterrupt:  # Ctrl-C before there is anything that could tell it better
    import sys

    sys.stderr.write("interrupted\n")
    raise SystemExit(130) from None

__all__ = ["main"]
