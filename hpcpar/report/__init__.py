"""What a run did and where its time went, from the files of its directory: as plain values, as text, as a page."""

from hpcpar.report.facts import gather

__all__ = ["gather"]
