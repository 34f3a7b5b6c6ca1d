"""Operations on tensors: each is a layout rule, a local kernel and a gradient rule."""

import os

from hpcpar.ops import methods

methods.bind()

if os.environ.get("HPCPAR_CHECK", "0") not in ("", "0"):
    from hpcpar.checks.mode import enable_from_environment

    enable_from_environment()
