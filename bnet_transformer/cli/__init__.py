"""The command line, `bnet-transformer`: each command is imported when it is used.

Bad input is one clear line on the standard error and exit code 2, an interrupt 130. `group` runs a command and tells
its errors; `signatures` derives options from the functions that commands call; `shared` has the net and the sentences,
`outputs` what is printed and written.
"""

try:
    from bnet_transformer.cli.group import main
except KeyboardInterrupt:  # Ctrl-C before there is anything that could tell it better
    import sys

    sys.stderr.write("interrupted\n")
    raise SystemExit(130) from None

__all__ = ["main"]
