"""Operations on tensors: each is a layout rule, a local kernel and a gradient rule."""

from hpcpar.ops import methods

methods.bind()
