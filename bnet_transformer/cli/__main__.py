"""`python -m bnet_transformer.cli`: the command line where its script is not on the path."""

from bnet_transformer.cli import main

main(prog_name="bnet-transformer")
