"""The command line, `bnet-transformer`.

The modules, in the order of a call: `group` imports the module of a command when the command is used, creates its
options from the signatures of Python functions, and turns an exception into one line on the standard error and an exit
code: 1 for a bug, 2 for invalid input, 130 for an interrupt. `io` parses sentences, values and names, and prints and
writes the results. `nets`, `questions` and `learning` contain the commands.
"""

try:
    from bnet_transformer.cli.group import main
except KeyboardInterrupt:  # Ctrl-C while click and the group are being imported
    import sys

    sys.stderr.write("interrupted\n")
    raise SystemExit(130) from None

__all__ = ["main"]
