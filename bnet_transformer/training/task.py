"""Whether a net can be trained by its likelihood, or can generate words: both need a readout and no open choice."""

from __future__ import annotations

from bnet_transformer.data.task import Task, infer_task
from bnet_transformer.errors import BNetError
from bnet_transformer.network import Network


def infer_trainable_task(network: Network, *, generates: bool = False) -> Task:
    """Infer the task of a net that follows the log probability of its readouts.

    Args:
        network: the net.
        generates: whether words are to be generated, which changes what the errors advise.

    Returns:
        The task, which has at least one readout.

    Raises:
        BNetError: where the net has no readout, or a random choice beneath one.
    """
    task = infer_task(network)
    out_of = network.graph.out_of
    choices = [m.family.name for m in network.members if m.tpm.is_random and out_of[m.family.index]]
    if not task.readouts:
        wanted, ways = "a readout to train on: a net without observe= has no likelihood", ", or loss= of train"
        if generates:
            wanted, ways = "a readout that tells the next word", ""
        got = "no Categorical or Normal node that nothing reads"
        raise BNetError("net", expected=wanted, got=got, allowed=f"observe= or readout= of the net{ways}")
    if choices:
        other = "a net with combine='concat'"
        wanted, ways = "train follows one gradient", f"bt.fit, which sums choices out; loss= of yours; {other}"
        if generates:
            wanted, ways = "each word is chosen from one distribution", other
        wanted = f"no random choice beneath the readouts: {wanted}"
        raise BNetError("net", expected=wanted, got=", ".join(choices[:4]), allowed=ways)
    return task
