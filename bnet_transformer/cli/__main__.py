"""Run the command line with `python -m bnet_transformer.cli`, for example if its script is not on the PATH."""

from bnet_transformer.cli import main

main(prog_name="bnet-transformer")
