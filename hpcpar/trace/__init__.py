"""What each rank does, and when: spans in a bounded memory, and from them one timeline of all ranks.

`span` marks a part of the program and costs next to nothing while nobody records. The spans of kernels, operations and
messages are entered by `hpcpar.trace.instruments`, which puts itself round them only while a trace is made.
"""

from hpcpar.trace.recorder import Event, Recorder, active, span

__all__ = ["Event", "Recorder", "active", "span"]
