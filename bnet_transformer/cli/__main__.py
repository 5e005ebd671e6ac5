"""Run the command line by `python -m bnet_transformer.cli`, where its script is not on the path."""

from bnet_transformer.cli import main

main(prog_name="bnet-transformer")
