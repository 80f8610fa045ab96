"""The `library` candidate: the block as PyTorch's own forms compute it, which a generated kernel has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from codegen.config import Config, tunable

FORMS = ("eager", "SDPA", "torch.compile", "torch.compile + SDPA")
"""As codegen/reference.py's Model and ModelSDPA write the block, each called directly and through torch.compile."""
KERNELS = "kernels"
"""What a module uses that does not use one of FORMS."""


@dataclass(frozen=True)
class LibraryConfig(Config):
    """One PyTorch form. It is measured and recorded like a configuration, but there is nothing to render."""

    family: ClassVar[str] = "library"

    form: str = tunable("SDPA", FORMS, "how the block is written in PyTorch")
