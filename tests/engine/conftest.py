"""Tiny models are slower on several threads, and many times slower where other work shares the cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
