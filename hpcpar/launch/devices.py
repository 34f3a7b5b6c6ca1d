"""Which of the GPUs that a rank can see it takes: a function of what all ranks of the node see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """One rank's GPU.

    Attributes
    ----------
    index : int
        Among the devices that the rank can see, from 0: CUDA's number.
    ranks : int
        How many ranks of the node take the same device, this one included.
    """

    index: int
    ranks: int


def choose_devices(visible: Sequence[Sequence[str]]) -> list[Choice]:
    """Return the device of every rank of one node.

    A batch system shows each rank one device, or all ranks all devices, or the devices of a socket to the ranks that
    are bound to it. CUDA numbers from 0 what is visible, so a number says nothing without the identity behind it: each
    rank takes the device of its own list that the fewest ranks have taken, the earliest of these. Where all see the
    same n devices, rank r of the node has device r modulo n; where each sees one, it has number 0.

    Parameters
    ----------
    visible : sequence of sequence of str
        For each rank of the node, in rank order, the identities (UUID) of its devices in CUDA's order. What matters is
        the place in the node, not the rank in the job: ranks may be dealt to nodes in any order.

    Raises
    ------
    ValueError
        A rank sees no device.
    """
    blind = [rank for rank, devices in enumerate(visible) if not devices]
    if blind:
        raise ValueError(f"rank {blind[0]} of {len(visible)} on the node sees no GPU, all of them must or none")
    load: Counter[str] = Counter()
    taken: dict[int, str] = {}
    # those with the least choice first: a rank that sees one device must not find it taken by one that had several
    for rank in sorted(range(len(visible)), key=lambda r: (len(visible[r]), r)):
        taken[rank] = min(visible[rank], key=lambda device: load[device])
        load[taken[rank]] += 1
    return [Choice(list(devices).index(taken[rank]), load[taken[rank]]) for rank, devices in enumerate(visible)]


def choose_device(hosts: Sequence[str], visible: Sequence[Sequence[str]], rank: int) -> tuple[Choice, str]:
    """Return the device of one rank of a job, and a warning ("" if there is none) that is the same on all ranks.

    Parameters
    ----------
    hosts : sequence of str
        The node of each rank of the job.
    visible : sequence of sequence of str
        The devices of each rank of the job, as in `choose_devices`.
    rank : int
        This rank in the job.

    Raises
    ------
    ValueError
        A rank of this job sees no device; names its node.
    """
    choices: dict[int, Choice] = {}
    for host in dict.fromkeys(hosts):
        members = [r for r, name in enumerate(hosts) if name == host]
        try:
            chosen = choose_devices([visible[r] for r in members])
        except ValueError as error:
            raise ValueError(f"{host}: {error}") from None
        choices.update(zip(members, chosen, strict=True))
    most = max(choices, key=lambda r: choices[r].ranks)
    if choices[most].ranks == 1:
        return choices[rank], ""
    words = f"{hosts[most]}: {choices[most].ranks} ranks share one GPU, as there are more ranks than GPUs to see"
    return choices[rank], words
