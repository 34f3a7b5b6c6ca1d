"""How fast this machine runs the package: as ratios to what it can do at best, and to torch, within one run.

Every contestant is a process of its own, with its own environment, and computes only when it is its turn (`process`);
turns alternate, so that a slow minute of the machine slows all of them. `suite` lists the groups, `targets` what they
are to reach.
"""

from __future__ import annotations
