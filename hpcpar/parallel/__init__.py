"""Strategies that span a model: plans of layouts, process grids, and the synchronisation of gradients."""

from hpcpar.parallel import grids
from hpcpar.parallel.gradients import GradientSync
from hpcpar.parallel.plan import Column, Placement, Row, describe, parallelize

__all__ = ["Column", "GradientSync", "Placement", "Row", "describe", "grids", "parallelize"]
