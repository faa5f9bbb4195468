"""The format version and the features a reader must understand.

The version is public API: a reader of version N reads every version up to N, and refuses a newer one by name.
Fields that a reader does not know are ignored; a change that may not be ignored gets a name in `requires`.
"""

from __future__ import annotations

from typing import Final

FORMAT_VERSION: Final = 1
FEATURES: Final = frozenset[str]()
"""Names that this version understands in `requires`."""
