"""One thread each: test machines are shared, and results must not depend on the number of cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
