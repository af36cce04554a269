"""What a process imports or builds at its first use of it: the zygote imports this, and all of its children have it.

Arrow imports pandas at its first conversion, where it is installed, and that takes longer than a whole round.
"""

from __future__ import annotations

import pyarrow as pa

from penstock.batch import Batch
from penstock.columns import PARTITION_SEED

pa.array([b"warm"])
Batch.build([b"warm"], key=[b"up"]).key_hashes(PARTITION_SEED)
