"""How bytes move: communicators that speak arrays, point-to-point exchanges, the byte counter, failure of a rank."""

from hpcpar.transport.comm import Comm

__all__ = ["Comm"]
